"""Drafts out of a request's own text: what followed the last few tokens where they stood before.

    ids      ... a  b  c  d  e ........ a  b  c
                          [ draft ...          )   the tokens behind the newest earlier `a b c`

A table of fixed size says where each n-gram stood last, so that a token costs one write and a draft one read, however
long the text is. Source: prompt lookup decoding (Saxena, 2023). Pure: standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import cycle, islice

NUM_GRAM = 3
"""Tokens that have to agree: after two of them what follows is mostly something else."""
MAX_TOKENS = 16384
"""So many of a prompt's last tokens are looked at."""
FIRST_ACCEPTANCE = 0.5


class PromptLookup:
    """The prompt and output of one request. A `engine.speculation.drafter.DraftSource`.

    Where two n-grams share a place of the table the newer one has it.
    """

    def __init__(self, prompt_ids: Sequence[int], max_output: int) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self._ids = [*prompt_ids[-MAX_TOKENS:]]
        most = min(len(self._ids) + max_output, 2 * MAX_TOKENS)
        # Four times as many places as there are n-grams: few share one. None ends at place 0.
        self._mask = (1 << (4 * most - 1).bit_length()) - 1
        self._end_by_hash = array("i", bytes(4 * (self._mask + 1)))
        ids, mask, ends = self._ids, self._mask, self._end_by_hash
        # Not the last one, which nothing has followed yet.
        for end, gram in enumerate(zip(ids, ids[1:], ids[2:-1], strict=False), NUM_GRAM):
            ends[hash(gram) & mask] = end

    def push(self, token_id: int) -> None:
        """Append a token of the output."""
        if len(self._ids) >= NUM_GRAM:
            self._end_by_hash[hash(tuple(self._ids[-NUM_GRAM:])) & self._mask] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, count: int) -> list[int]:
        """Return what may come next, `count` tokens of it or none; a repeat that is under way goes on."""
        gram = self._ids[-NUM_GRAM:]
        end = self._end_by_hash[hash(tuple(gram)) & self._mask]
        if not end or self._ids[end - NUM_GRAM : end] != gram:
            return []
        return list(islice(cycle(self._ids[end : end + count]), count))
