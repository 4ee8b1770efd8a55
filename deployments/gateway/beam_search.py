"""Beam search over token sequences: which ones to expand, and which are finished. Pure: knows no replicas, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain

from engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence, its log-probability, and the log-probabilities of each of its tokens (`scores`)."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    scores: tuple[TokenLogprobs, ...] = ()

    def grown(self, expansion: TokenLogprobs, num_top: int) -> list[Beam]:
        """Return one longer beam per token of `expansion.top`; each keeps `num_top` alternatives of that position."""
        kept = expansion.top[:num_top]
        return [
            Beam(
                (*self.token_ids, token_id),
                self.logprob + logprob,
                (*self.scores, TokenLogprobs(logprob, kept, rank)),
            )
            for rank, (token_id, logprob) in enumerate(expansion.top, 1)
        ]


class BeamSearch:
    """A search for the `width` best continuations of one prompt, of at most `max_tokens` tokens.

    A finished continuation scores its log-probability / its number of tokens ^ `length_penalty`. The search stops once
    `width` are finished and the best open one, scored as if it ended now, does not beat the worst of them. Open ones
    that reach `max_tokens` end there. Source: beam search of transformers' `generate` with `early_stopping` false,
    after Graves, 2012, "Sequence transduction with recurrent neural networks", section 2.5.

    Args:
        ends: token ids that end a continuation.
        num_top: how many of the likeliest tokens to keep for each position of a continuation.

    Attributes:
        open: the beams to expand, likeliest first; empty once the search is over.
        found: the best finished beams so far, best first.
    """

    def __init__(
        self, width: int, *, max_tokens: int, length_penalty: float, ends: frozenset[int], num_top: int = 0
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._ends = ends
        self._num_top = num_top
        self.open = [Beam()]
        self.found: list[Beam] = []

    @property
    def num_expansions(self) -> int:
        """How many of the likeliest tokens each expansion needs, so that `width` beams stay open even if others end."""
        return max(2, 1 + len(self._ends)) * self._width

    def advance(self, expansions: Sequence[TokenLogprobs]) -> None:
        """Advance by one token, given one expansion for each beam of `open`."""
        grown = chain.from_iterable(
            beam.grown(expansion, self._num_top) for beam, expansion in zip(self.open, expansions, strict=True)
        )
        likeliest = nlargest(self.num_expansions, grown, key=lambda beam: beam.logprob)
        ended = [beam for beam in likeliest[: self._width] if self._has_ended(beam)]
        self.found = nlargest(self._width, [*self.found, *ended], key=self._score)
        self.open = [beam for beam in likeliest if not self._has_ended(beam)][: self._width]
        is_full = len(self.found) == self._width
        if is_full and self.open and self._score(self.open[0]) <= self._score(self.found[-1]):
            self.open = []

    def _has_ended(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._ends or len(beam.token_ids) == self._max_tokens

    def _score(self, beam: Beam) -> float:
        return beam.logprob / math.pow(len(beam.token_ids), self._length_penalty)
