"""Draft tokens from a prediction: text that the client expects to be the answer, except in some places.

    prediction   a  b  c  d  e  f  g  h
    answer       a  b  X  Y  e  f  g           resynchronized at `e f`, nearest after the point of divergence

Pure: standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

FIRST_ACCEPTANCE = 0.9
"""A client that sends a prediction expects it to be right."""


class Prediction:
    """Follows the answer through its prediction.

    Attributes:
        acceptance: the probability that a draft token is right if those before it are, 0 to 1; the drafter learns it.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self._ids = list(token_ids)
        self._ends_by_pair: dict[tuple[int, int], list[int]] = {}
        for end, pair in enumerate(pairwise(self._ids), 2):
            self._ends_by_pair.setdefault(pair, []).append(end)
        self._place, self._is_lost = 0, False
        self._last_id: int | None = None

    def push(self, token_id: int) -> None:
        """Record a token of the answer."""
        if not self._is_lost and self._ids[self._place : self._place + 1] == [token_id]:
            self._place += 1
        else:
            found = None if self._last_id is None else self._found((self._last_id, token_id))
            self._is_lost = found is None
            self._place = self._place if found is None else found
        self._last_id = token_id

    def draft(self, count: int) -> list[int]:
        """Return what comes next if the prediction is right, at most `count` tokens."""
        return [] if self._is_lost else self._ids[self._place : self._place + count]

    def _found(self, pair: tuple[int, int]) -> int | None:
        """Return the place after the pair: the nearest at or after the current place, else the last one before it."""
        ends = self._ends_by_pair.get(pair)
        return None if ends is None else ends[min(bisect_left(ends, self._place), len(ends) - 1)]
