"""Releases token scores together with the text of their tokens: not before it was screened, and not past a cut."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deployments.generation import TokenScore


@dataclass(frozen=True, slots=True)
class _Held:
    start: int
    end: int
    score: TokenScore


class HeldScores:
    """The scores of one answer that are not released yet. Positions are characters of its text."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()

    def add(self, start: int, end: int, score: TokenScore) -> None:
        """Hold the score of a token whose text spans [start, end)."""
        self._held.append(_Held(start, end, score))

    def release(self, num_chars: int) -> tuple[TokenScore, ...]:
        """Return the unreleased scores of tokens that end within the first `num_chars` characters."""
        released = []
        while self._held and self._held[0].end <= num_chars:
            released.append(self._held.popleft().score)
        return tuple(released)

    def close(self, num_chars: int | None) -> tuple[TokenScore, ...]:
        """Return the remaining scores of tokens that begin before character `num_chars`, or all if it is None."""
        left = tuple(item.score for item in self._held if num_chars is None or item.start < num_chars)
        self._held.clear()
        return left
