"""Which tokens of a vocabulary have a text inside. Pure: knows the tokens' bytes by their ids, and nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class SpellingIndex:
    """The spellings of all tokens, one behind the other; a search is one pass over them.

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
        """Return the ids of the tokens that have `text` (at least one byte) inside, ascending."""
        found = []
        at = self._joined.find(text)
        while at >= 0:
            token_id = bisect_right(self._ends, at)
            end = self._ends[token_id]
            if at + len(text) <= end:
                found.append(token_id)
                at = self._joined.find(text, end)
            else:
                # It reaches into the next token.
                at = self._joined.find(text, at + 1)
        return tuple(found)
