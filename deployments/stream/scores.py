"""Releases token scores together with the text of their tokens: not before it was screened, and not past a cut."""

from __future__ import annotations

from collections import deque

from deployments.generation import TokenScore


class HeldScores:
    """The scores of one answer that are not released yet. Positions are characters of its text."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, int, TokenScore]] = deque()

    def add(self, start: int, end: int, score: TokenScore) -> None:
        """Hold the score of a token whose text spans [start, end)."""
        self._held.append((start, end, score))

    def release(self, num_chars: int) -> tuple[TokenScore, ...]:
        """Return the unreleased scores of tokens that end within the first `num_chars` characters."""
        released = []
        while self._held and self._held[0][1] <= num_chars:
            released.append(self._held.popleft()[2])
        return tuple(released)

    def close(self, num_chars: int | None) -> tuple[TokenScore, ...]:
        """Return the remaining scores of tokens that begin before character `num_chars`, or all if it is None."""
        left = tuple(score for start, _, score in self._held if num_chars is None or start < num_chars)
        self._held.clear()
        return left
