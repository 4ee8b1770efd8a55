"""Which rows of a batch need which sampling operations: computed when the rows change, and kept until then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.placing import placed
from engine.request import SamplingParams
from engine.sampling.edits import LogitEdits
from engine.sampling.grammar import GrammarFollower
from engine.sampling.masks import Bits, joint
from engine.sampling.repeats import RepeatPenalties


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """Sampling state of a row from admission to release."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    stop_ids: tuple[int, ...]
    edits: LogitEdits | None
    follower: GrammarFollower | None
    repeats: RepeatPenalties | None

    @property
    def is_masked(self) -> bool:
        """Whether only some tokens are allowed."""
        return self.follower is not None or (self.edits is not None and self.edits.allowed is not None)

    def allowed(self) -> Bits:
        """Return the mask of the tokens that may come next, of a row that is masked."""
        own = None if self.edits is None else self.edits.allowed
        if self.follower is None:
            assert own is not None, "the row has no mask"
            return own
        by_grammar = self.follower.allowed()
        return by_grammar if own is None else joint(by_grammar, own)


class Lineup:
    """The rows that draw, and which of their lines need what. A line is a row's index in the logits.

    Attributes:
        told: lines whose log-probabilities are requested.
        biased: where among all logits biases are added, and these, int64 and float32 [n]; None for none.
        worded: lines with bad words of several tokens.
        masked: lines of which only some tokens are allowed.
        penalized, repeated: lines with penalties for tokens, and for repeated sequences.
        delayed: lines with a minimum number of tokens.
        followed: lines whose state must be told each drawn token.
        groups: lines by number of sorted candidates, from `draw_groups`.
    """

    def __init__(
        self, rows: Sequence[int], states: list[RowState], vocab_size: int, device: torch.device, *, has_simple: bool
    ) -> None:
        self.rows = list(rows)
        self.states = states
        self.params = [state.params for state in states]
        lines = list(enumerate(states))
        self.told = [line for line, state in lines if state.params.num_logprobs is not None]
        edited = [(line, state.edits) for line, state in lines if state.edits is not None]
        self.biased = _biased(edited, vocab_size, device)
        self.worded = [line for line, edits in edited if edits.bad_words]
        self.masked = [line for line, state in lines if state.is_masked]
        self.penalized = [line for line, state in lines if state.params.has_penalties]
        self.repeated = [line for line, state in lines if state.repeats is not None]
        self.delayed = [line for line, state in lines if state.params.min_tokens > 0]
        self.followed = [line for line, state in lines if state.params.is_followed]
        self.groups = draw_groups(self.params, vocab_size, has_simple=has_simple)

    def pieces(self, most: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the groups, as (number of sorted candidates, lines), in pieces of at most `most` lines."""
        for width, lines in self.groups.items():
            for start in range(0, len(lines), most):
                yield width, lines[start : start + most]


def _biased(
    edited: Sequence[tuple[int, LogitEdits]], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    places = [line * vocab_size + edits.biased_ids for line, edits in edited if len(edits.biased_ids)]
    if not places:
        return None
    biases = np.concatenate([edits.biases for _, edits in edited])
    return placed(np.concatenate(places), device), placed(biases, device, torch.float32)


def draw_groups(params: Sequence[SamplingParams], vocab_size: int, *, has_simple: bool) -> dict[int, list[int]]:
    """Group the lines that draw by how many candidates are sorted: 0 for none, `vocab_size` for top-p alone.

    A group has one width, so that a row's sums have the same terms in the same order whatever the batch. Without
    `has_simple`, lines that a `TokenChooser` has drawn for are left out.
    """
    lines_by_width: dict[int, list[int]] = {}
    for line, p in enumerate(params):
        if p.temperature == 0:
            continue
        has_top_k = 0 < p.top_k < vocab_size
        width = p.top_k if has_top_k else vocab_size if p.top_p < 1 else 0
        if has_simple or _is_shortened(p):
            lines_by_width.setdefault(width, []).append(line)
    return lines_by_width


def _is_shortened(p: SamplingParams) -> bool:
    return p.top_n_sigma > 0 or p.typical_p < 1 or p.epsilon_cutoff > 0 or p.eta_cutoff > 0 or p.xtc_probability > 0
