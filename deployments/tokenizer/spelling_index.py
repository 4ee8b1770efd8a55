"""Finds the tokens of a vocabulary that contain a given text. Pure: knows only the bytes of each token id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class SpellingIndex:
    """The concatenated spellings of all tokens; a search is one pass over them.

    Args:
        spellings: the bytes of token 0, 1, ...
    """

    def __init__(self, spellings: Iterable[bytes]) -> None:
        pieces = list(spellings)
        self._joined = b"".join(pieces)
        self._ends: list[int] = []
        end = 0
        for piece in pieces:
            end += len(piece)
            self._ends.append(end)

    def containing(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of the tokens that contain `text` (at least one byte), in ascending order."""
        found = []
        at = self._joined.find(text)
        while at >= 0:
            token_id = bisect_right(self._ends, at)
            end = self._ends[token_id]
            if at + len(text) <= end:
                found.append(token_id)
                at = self._joined.find(text, end)
            else:
                # The match extends into the next token.
                at = self._joined.find(text, at + 1)
        return tuple(found)
