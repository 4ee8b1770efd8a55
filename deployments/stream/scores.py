"""Scores of tokens leave with the text that the tokens end in: neither before it was judged, nor where it was cut."""

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
    """The scores of one answer that have not left. Places are characters of its text."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()

    def add(self, start: int, end: int, score: TokenScore) -> None:
        """Hold a token that took the text from `start` to `end`."""
        self._held.append(_Held(start, end, score))

    def release(self, num_chars: int) -> tuple[TokenScore, ...]:
        """Return the tokens that end in the first `num_chars` characters, and have not been returned yet."""
        released = []
        while self._held and self._held[0].end <= num_chars:
            released.append(self._held.popleft().score)
        return tuple(released)

    def close(self, num_chars: int | None) -> tuple[TokenScore, ...]:
        """Return those left that begin in the first `num_chars` characters: all that the text ends in; None for all."""
        left = tuple(item.score for item in self._held if num_chars is None or item.start < num_chars)
        self._held.clear()
        return left
