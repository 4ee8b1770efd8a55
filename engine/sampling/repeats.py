"""Penalties of what would repeat a sequence that was there before: DRY and LZ. Token ids only.

Both ask how many of the tokens before an earlier place are those at the end: `SuffixMatches` knows, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.request import DryPenalty, LzPenalty, Request
from engine.sampling.placing import placed

Edits = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Distinct token ids and what is taken from their logits, [n] each."""

MAX_PENALTY = 1e30
"""Finite, so that a row whose every likely token is penalised is no failed one."""


class SuffixMatches:
    """A growing sequence, and for each of its places how many tokens up to there are those at its end.

        ids        a  b  c  x  a  b  c
        lengths    0  0  3  0  0  0         (of all places but the last)

    It begins in linear time (the Z-algorithm on the reversed sequence; Gusfield, 1997, "Algorithms on strings, trees,
    and sequences", section 1.4), and a further token costs one pass over the lengths.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.array(token_ids, dtype=np.int64)
        self._num_tokens = len(token_ids)
        self.lengths = np.array(_suffix_lengths(token_ids), dtype=np.int64)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The sequence, int64; overwritten by what comes next."""
        return self._ids[: self._num_tokens]

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self._num_tokens:
            grown = np.concatenate(([1], self.lengths + 1))
            self.lengths = np.where(self.ids == token_id, grown, 0)
        if self._num_tokens == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(len(self._ids) + 64, dtype=np.int64)))
        self._ids[self._num_tokens] = token_id
        self._num_tokens += 1


class DryRow:
    """DRY of one row: what tokens lose that would extend a repeat of at least `allowed_length` tokens.

        multiplier * base ^ (length of the repeat - allowed_length)

    A repeat lies in the last `last_n` tokens of prompt and output and reaches over no breaker; tokens that are breakers
    themselves lose nothing. Source: DRY ("don't repeat yourself"), P. E. Weidmann, 2024, as interfaces for text
    generation have it.
    """

    def __init__(self, penalty: DryPenalty, vocab_size: int, token_ids: Sequence[int]) -> None:
        self._penalty = penalty
        # A table: of one string there may be thousands of tokens.
        self._is_breaker = np.zeros(vocab_size, dtype=np.bool_)
        self._is_breaker[[word[0] for word in penalty.breakers if len(word) == 1 and word[0] < vocab_size]] = True
        self._breaker_words = [word for word in penalty.breakers if len(word) > 1]
        self._matches = SuffixMatches(token_ids)
        broken = self._broken(self._matches.ids)
        self._num_unbroken = len(broken) if not broken.any() else int(broken[::-1].argmax())
        self._longest_breaker = max((len(word) for word in penalty.breakers), default=1)

    def note(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self._matches.push(token_id)
        is_broken = self._broken(self._matches.ids[-self._longest_breaker :])[-1]
        self._num_unbroken = 0 if is_broken else self._num_unbroken + 1

    def edits(self) -> Edits:
        """Return what the next token's logits lose."""
        penalty, ids = self._penalty, self._matches.ids
        start = 0 if penalty.last_n < 0 else max(0, len(ids) - penalty.last_n)
        lengths = self._matches.lengths[start:]
        # No repeat begins before the window, nor before the last breaker.
        lengths = np.minimum(lengths, np.arange(1, len(lengths) + 1)).clip(max=self._num_unbroken)
        is_hit = lengths >= penalty.allowed_length
        following, lengths = ids[start + 1 :][is_hit], lengths[is_hit]
        is_held = ~self._is_breaker[following]
        distinct, longest = _highest_by_token(following[is_held], lengths[is_held])
        with np.errstate(over="ignore"):
            taken = penalty.multiplier * np.power(penalty.base, (longest - penalty.allowed_length).astype(np.float64))
        return distinct, taken.clip(max=MAX_PENALTY)

    def _broken(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return at which of some places a breaker ends."""
        broken = self._is_breaker[ids]
        for word in self._breaker_words:
            if len(word) <= len(ids):
                shifted = [ids[at : len(ids) - len(word) + 1 + at] == token_id for at, token_id in enumerate(word)]
                broken[len(word) - 1 :] |= np.logical_and.reduce(shifted)
        return broken


class LzRow:
    """The LZ penalty of one row: a token loses `strength` times the bits that LZ77 saves by pointing back at it.

        log2(vocabulary) - log2(distance)

    `distance` is that of the place in the last `lookback` tokens of the output where the token comes after the longest
    match with the output's end (at most `buffer` tokens of it), of equally long ones the nearest. A token that is not
    there would be spelt out, and loses nothing. Source: Ginart et al., 2025, "LZ penalty: an information-theoretic
    repetition penalty for autoregressive language models", arXiv 2504.20131, with the code lengths of its authors'
    serving implementation.
    """

    def __init__(self, penalty: LzPenalty, vocab_size: int, output_ids: Sequence[int]) -> None:
        self._penalty = penalty
        self._vocab_size = vocab_size
        self._matches = SuffixMatches(output_ids[-penalty.lookback :])

    def note(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self._matches.push(token_id)

    def edits(self) -> Edits:
        """Return what the next token's logits lose."""
        window, buffer = self._penalty.lookback, self._penalty.buffer
        ids, before = self._matches.ids[-window:], self._matches.lengths
        # Matches lie inside the window: the token at its front follows nothing.
        lengths = np.concatenate(([0], before))[-window:][: len(ids)]
        lengths = np.minimum(lengths, np.arange(len(ids))).clip(max=buffer)
        distinct, best = _highest_by_token(ids, lengths * window + np.arange(len(ids)))
        distance = len(ids) - best % window
        saved = np.log2(self._vocab_size) - np.log2(distance)
        return distinct, self._penalty.strength * saved.clip(min=0)


class RepeatPenalties:
    """Those of one row that it asks for."""

    def __init__(self, rows: Sequence[DryRow | LzRow]) -> None:
        self._rows = rows

    @classmethod
    def of(cls, request: Request, vocab_size: int, output_ids: Sequence[int]) -> RepeatPenalties | None:
        """Return what a request asks for, None where it asks for none; `output_ids` are all tokens so far."""
        rows: list[DryRow | LzRow] = []
        if request.params.dry is not None:
            rows.append(DryRow(request.params.dry, vocab_size, (*request.prompt_ids, *output_ids)))
        if request.params.lz is not None:
            rows.append(LzRow(request.params.lz, vocab_size, output_ids))
        return cls(rows) if rows else None

    def apply(self, logits: torch.Tensor) -> None:
        """Edit the logits [vocab] of the next token in place. NaN stays what it is."""
        for row in self._rows:
            token_ids, taken = row.edits()
            if len(token_ids):
                logits[placed(token_ids, logits.device)] -= placed(taken, logits.device, logits.dtype)

    def note(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        for row in self._rows:
            row.note(token_id)


def _suffix_lengths(token_ids: Sequence[int]) -> list[int]:
    """Return for each place but the last how many tokens up to there are those at the end."""
    backwards = list(reversed(token_ids))
    count = len(backwards)
    lengths = [0] * count
    # What was compared last is the same as the front from `left` to `right`.
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
