"""Penalties for tokens that would repeat an earlier sequence: DRY and LZ. Works on token ids only.

Both need to know how many tokens up to an earlier place match the end of the sequence: `SuffixMatches` maintains this,
token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.placing import placed
from engine.request import DryPenalty, LzPenalty, Request

Edits = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Distinct token ids and what is subtracted from their logits, [n] each."""

MANY_TOKENS = 100
"""So many at once are not appended one by one: a grammar may force tens of thousands, each a pass over all before."""
MAX_PENALTY = 1e30
"""Finite, so that a row does not fail when all its likely tokens are penalized."""


class SuffixMatches:
    """A growing sequence and, for each place, how many tokens up to it match the end of the sequence.

        ids        a  b  c  x  a  b  c
        lengths    0  0  3  0  0  0         (of all places but the last)

    Construction takes linear time (the Z-algorithm on the reversed sequence; Gusfield, 1997, "Algorithms on strings,
    trees, and sequences", section 1.4), and so do many tokens at once. Each of a few takes one pass over the lengths.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.array(token_ids, dtype=np.int64)
        self._num_tokens = len(token_ids)
        self.lengths = np.array(_suffix_lengths(token_ids), dtype=np.int64)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The sequence, int64; a view of the buffer."""
        return self._ids[: self._num_tokens]

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        if len(token_ids) < MANY_TOKENS:
            for token_id in token_ids:
                self._push(token_id)
            return
        whole = SuffixMatches([*self.ids.tolist(), *token_ids])
        self._ids, self._num_tokens, self.lengths = whole._ids, whole._num_tokens, whole.lengths

    def _push(self, token_id: int) -> None:
        if self._num_tokens:
            grown = np.concatenate(([1], self.lengths + 1))
            self.lengths = np.where(self.ids == token_id, grown, 0)
        if self._num_tokens == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(len(self._ids) + 64, dtype=np.int64)))
        self._ids[self._num_tokens] = token_id
        self._num_tokens += 1


class DryRow:
    """The DRY penalty of one row, for tokens that would extend a repeat of at least `allowed_length` tokens.

        multiplier * base ^ (length of the repeat - allowed_length)

    A repeat lies in the last `last_n` tokens of prompt and output and does not reach across a breaker. Tokens that are
    breakers are not penalized. Source: DRY ("don't repeat yourself"), P. E. Weidmann, 2024, as implemented by
    interfaces for text generation.
    """

    def __init__(self, penalty: DryPenalty, vocab_size: int, token_ids: Sequence[int]) -> None:
        self._penalty = penalty
        # A table: thousands of tokens may contain one breaker string.
        self._is_breaker = np.zeros(vocab_size, dtype=np.bool_)
        self._is_breaker[[word[0] for word in penalty.breakers if len(word) == 1 and word[0] < vocab_size]] = True
        self._breaker_words = [word for word in penalty.breakers if len(word) > 1]
        self._matches = SuffixMatches(token_ids)
        self._longest_breaker = max((len(word) for word in penalty.breakers), default=1)
        self._num_unbroken = 0
        self._count_unbroken(len(token_ids))

    def note(self, token_ids: Sequence[int]) -> None:
        """Record tokens that have been chosen."""
        self._matches.push(token_ids)
        self._count_unbroken(len(token_ids))

    def edits(self) -> Edits:
        """Return the penalties of the next token's logits."""
        penalty, ids = self._penalty, self._matches.ids
        start = 0 if penalty.last_n < 0 else max(0, len(ids) - penalty.last_n)
        lengths = self._matches.lengths[start:]
        # No repeat starts before the window or before the last breaker.
        lengths = np.minimum(lengths, np.arange(1, len(lengths) + 1)).clip(max=self._num_unbroken)
        is_hit = lengths >= penalty.allowed_length
        following, lengths = ids[start + 1 :][is_hit], lengths[is_hit]
        is_held = ~self._is_breaker[following]
        distinct, longest = _highest_by_token(following[is_held], lengths[is_held])
        with np.errstate(over="ignore"):
            taken = penalty.multiplier * np.power(penalty.base, (longest - penalty.allowed_length).astype(np.float64))
        return distinct, taken.clip(max=MAX_PENALTY)

    def _count_unbroken(self, num_new: int) -> None:
        """Count the tokens at the end behind the last breaker, of which so many are new."""
        ids = self._matches.ids
        broken = self._broken(ids[max(0, len(ids) - num_new - self._longest_breaker + 1) :])
        # Breakers that end before the new tokens have been counted.
        broken = broken[len(broken) - num_new :]
        self._num_unbroken = int(broken[::-1].argmax()) if broken.any() else self._num_unbroken + num_new

    def _broken(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each place of `ids`, whether a breaker ends there."""
        broken = self._is_breaker[ids]
        for word in self._breaker_words:
            if len(word) <= len(ids):
                shifted = [ids[at : len(ids) - len(word) + 1 + at] == token_id for at, token_id in enumerate(word)]
                broken[len(word) - 1 :] |= np.logical_and.reduce(shifted)
        return broken


class LzRow:
    """The LZ penalty of one row: `strength` times the bits that LZ77 saves by a back-reference to the token.

        log2(vocabulary) - log2(distance)

    `distance` is that to the place in the last `lookback` tokens of the output where the token follows the longest
    match with the output's end (at most `buffer` tokens of it), of equally long matches the nearest. A token not found
    there would be a literal, and is not penalized. Source: Ginart et al., 2025, "LZ penalty: an information-theoretic
    repetition penalty for autoregressive language models", arXiv 2504.20131, with the code lengths of its authors'
    serving implementation.
    """

    def __init__(self, penalty: LzPenalty, vocab_size: int, output_ids: Sequence[int]) -> None:
        self._penalty = penalty
        self._vocab_size = vocab_size
        self._matches = SuffixMatches(output_ids[-penalty.lookback :])

    def note(self, token_ids: Sequence[int]) -> None:
        """Record tokens that have been chosen."""
        self._matches.push(token_ids)

    def edits(self) -> Edits:
        """Return the penalties of the next token's logits."""
        window, buffer = self._penalty.lookback, self._penalty.buffer
        ids, before = self._matches.ids[-window:], self._matches.lengths
        # Matches lie inside the window: its first token has no tokens before it.
        lengths = np.concatenate(([0], before))[-window:][: len(ids)]
        lengths = np.minimum(lengths, np.arange(len(ids))).clip(max=buffer)
        distinct, best = _highest_by_token(ids, lengths * window + np.arange(len(ids)))
        distance = len(ids) - best % window
        saved = np.log2(self._vocab_size) - np.log2(distance)
        return distinct, self._penalty.strength * saved.clip(min=0)


class RepeatPenalties:
    """The repeat penalties of one row."""

    def __init__(self, rows: Sequence[DryRow | LzRow]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, request: Request, vocab_size: int, output_ids: Sequence[int]) -> RepeatPenalties | None:
        """Return the penalties that a request asks for, None for none; `output_ids` are all output tokens so far."""
        rows: list[DryRow | LzRow] = []
        if request.params.dry is not None:
            rows.append(DryRow(request.params.dry, vocab_size, (*request.prompt_ids, *output_ids)))
        if request.params.lz is not None:
            rows.append(LzRow(request.params.lz, vocab_size, output_ids))
        return cls(rows) if rows else None

    def apply(self, logits: torch.Tensor) -> None:
        """Edit the logits [vocab] of the next token in place. NaN stays NaN."""
        for row in self._rows:
            token_ids, taken = row.edits()
            if len(token_ids):
                logits[placed(token_ids, logits.device)] -= placed(taken, logits.device, logits.dtype)

    def note(self, token_ids: Sequence[int]) -> None:
        """Record tokens that have been chosen."""
        for row in self._rows:
            row.note(token_ids)


def _suffix_lengths(token_ids: Sequence[int]) -> list[int]:
    """Return for each place but the last how many tokens up to it match the end of the sequence."""
    backwards = list(reversed(token_ids))
    count = len(backwards)
    lengths = [0] * count
    # The Z-box: from `left` to `right` the sequence equals its own beginning.
    left = right = 0
    for place in range(1, count):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < count and backwards[length] == backwards[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths[:0:-1]


def _highest_by_token(
    token_ids: NDArray[np.int64], values: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct token ids and the highest value of each."""
    distinct, place = np.unique(token_ids, return_inverse=True)
    highest = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(highest, place, values)
    return distinct, highest
