"""Draft tokens from a request's own text: what followed an earlier occurrence of its last few tokens.

    ids      ... a  b  c  d  e ........ a  b  c
                          [ draft ...          )   the tokens after the newest earlier `a b c`

A table of fixed size records where each n-gram last occurred, so that a token costs one write and a draft one read,
however long the text is. Source: prompt lookup decoding (Saxena, 2023). Pure: standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import cycle, islice

NUM_GRAM = 3
"""Tokens that must match: after a match of only two, the text mostly continues differently."""
MAX_TOKENS = 16384
"""Number of tokens at the end of a prompt that are searched."""
FIRST_ACCEPTANCE = 0.5


class PromptLookup:
    """Looks up the prompt and output of one request; if two n-grams collide in the table, the newer one remains.

    Attributes:
        acceptance: the probability that a draft token is right if those before it are, 0 to 1; the drafter learns it.
    """

    def __init__(self, prompt_ids: Sequence[int], max_output: int) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self._ids = [*prompt_ids[-MAX_TOKENS:]]
        most = min(len(self._ids) + max_output, 2 * MAX_TOKENS)
        # Four entries or more for each n-gram, up to that bound, so few collide. 0 means empty: no n-gram ends there.
        self._mask = (1 << (4 * most - 1).bit_length()) - 1
        self._end_by_hash = array("i", bytes(4 * (self._mask + 1)))
        ids, mask, ends = self._ids, self._mask, self._end_by_hash
        # Skip the last n-gram, which nothing has followed yet.
        for end, gram in enumerate(zip(ids, ids[1:], ids[2:-1], strict=False), NUM_GRAM):
            ends[hash(gram) & mask] = end

    def push(self, token_id: int) -> None:
        """Append a token of the output."""
        if len(self._ids) >= NUM_GRAM:
            self._end_by_hash[hash(tuple(self._ids[-NUM_GRAM:])) & self._mask] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, count: int) -> list[int]:
        """Return `count` tokens that may come next, or none; a match near the end of the text repeats cyclically."""
        gram = self._ids[-NUM_GRAM:]
        end = self._end_by_hash[hash(tuple(gram)) & self._mask]
        if self._ids[end - NUM_GRAM : end] != gram:
            return []
        return list(islice(cycle(self._ids[end : end + count]), count))
