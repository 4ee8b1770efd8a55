"""What crosses the border between the scheduler (pure) and the runner (tensors): one plan down, one result up.

There is no prefill mode and no decode mode. A request has computed up to one position and wants tokens up to another;
a row of the plan computes the half-open range between:

    tokens      0 ........ start ............ end ........ num_tokens
                [ in cache )[ computed by this step )[ a later chunk )

A row samples exactly when `end == num_tokens`, that is when its last known token is computed; then a request that asks
for a vector has it. Behind that token it may compute a draft of those that come next: a token is drawn behind each, as
long as the one before it was drawn as it had been drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from adapters.identity import AdapterDigest
from engine.request import Pooling, Request, RequestId, TokenLogprobs


class Snapshot(NamedTuple):
    """A state that is kept as it is at a position: behind the tokens before it. The place is one of `Snapshots`."""

    position: int
    place: int


class StepRow(NamedTuple):
    """One request's share of a step; a tuple, for each step makes as many as there are requests.

    Attributes:
        row: index of the request in the runner's persistent buffers, held from admission until retirement or
            pre-emption.
        is_admission: the row was given to this request in this step: its sampling state must be (re)built from
            `request` and `output_ids`.
        request: immutable; prompt, parameters, adapter.
        output_ids: tokens generated so far, prior output included (live view; read, never kept). The last may be
            `engine.scheduling.live_request.PENDING`: the step before draws it, and the device knows it first.
        start: first position to compute; everything before it is in the cache.
        end: one past the last position to compute; `start < end`.
        block_tables: of the request, those of the cache's layout (live view), long enough for position `stop - 1`; the
            null block stands for those that no layer of a table reads any more.
        samples: whether a token is drawn for position `end`.
        scores: whether the tokens that follow those of this row in the prompt are given their log-probabilities.
        draft_ids: tokens computed behind `end`, as if they had been drawn already; none of them ends the request, nor
            are they so many that one drawn behind them would be one too many.
        state_from: of an admission, where layers keep states: the place of the one that it goes on from; None at the
            beginning of a text.
        snapshots: of the positions behind `start` and up to `end` those whose states are kept, in their order.
    """

    row: int
    is_admission: bool
    request: Request
    output_ids: Sequence[int]
    start: int
    end: int
    block_tables: Sequence[Sequence[int]]
    samples: bool
    scores: bool = False
    draft_ids: tuple[int, ...] = ()
    state_from: int | None = None
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def stop(self) -> int:
        """One past the last position to compute, those of the draft included."""
        return self.end + len(self.draft_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that this row adds to the step's batch."""
        return self.stop - self.start

    @property
    def num_logits(self) -> int:
        """Positions at the end of this row whose logits are computed."""
        return self.num_tokens if self.scores else int(self.samples) + len(self.draft_ids)

    @property
    def num_pooled(self) -> int:
        """Positions at the end of this row whose hidden states are pooled."""
        if self.request.pooling is Pooling.MEAN:
            return self.num_tokens
        return int(self.request.pooling is Pooling.LAST and self.ends_prompt)

    @property
    def ends_prompt(self) -> bool:
        """Whether all that the request brought is computed with this row."""
        return self.end == len(self.request.prompt_ids) + len(self.request.prior_output_ids)

    @property
    def adapter(self) -> AdapterDigest | None:
        """Digest of the adapter, None for the base model."""
        return self.request.adapter

    @property
    def first_token_id(self) -> int:
        """Token id of the position `start`."""
        prompt = self.request.prompt_ids
        split = len(prompt)
        return prompt[self.start] if self.start < split else self.output_ids[self.start - split]

    def token_ids(self) -> list[int]:
        """Token ids of the positions [start, stop)."""
        prompt = self.request.prompt_ids
        split = len(prompt)
        ids = list(prompt[self.start : min(self.end, split)])
        if self.end > split:
            ids.extend(self.output_ids[max(self.start, split) - split : self.end - split])
        ids.extend(self.draft_ids)
        return ids


class StateMoves(NamedTuple):
    """What a step copies of the states of layers that have them.

    Attributes:
        begun: rows with the places that their states come from, before anything else.
        kept: by row what is kept, once the row has computed so far; a place may be one of those of `begun`.
    """

    begun: tuple[tuple[int, int], ...]
    kept: Mapping[int, Sequence[Snapshot]]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The work of one step. Rows of one token come before longer ones; in each group one adapter's rows are adjacent.

    Attributes:
        step_id: counts up from 1.
        rows: distinct requests, at most `max_num_seqs` of them.
        released_rows: row indices that fell free since the last plan (retired, cancelled or pre-empted).
        is_speculative: what is drawn may be the beginning of a draft.
    """

    step_id: int
    rows: tuple[StepRow, ...]
    released_rows: tuple[int, ...] = ()
    is_speculative: bool = False

    @cached_property
    def num_tokens(self) -> int:
        """Size of the batch in tokens; at most `max_batched_tokens`."""
        return sum(row.num_tokens for row in self.rows)

    @cached_property
    def num_decodes(self) -> int:
        """Rows of one token."""
        return sum(row.num_tokens == 1 for row in self.rows)

    @cached_property
    def has_pooled(self) -> bool:
        """Whether hidden states of some row are pooled."""
        return any(row.request.pooling is not None for row in self.rows)

    @cached_property
    def state_moves(self) -> StateMoves | None:
        """What is copied of states; None for nothing."""
        begun = tuple((row.row, row.state_from) for row in self.rows if row.state_from is not None)
        kept = {row.row: row.snapshots for row in self.rows if row.snapshots}
        return StateMoves(begun, kept) if begun or kept else None

    @property
    def needs_results(self) -> bool:
        """Whether the next step can be computed only by who knows what this one has drawn."""
        return self.is_speculative or any(row.scores or row.request.params.is_followed for row in self.rows)

    @cached_property
    def num_draft_tokens(self) -> int:
        """The tokens of all drafts."""
        return sum(len(row.draft_ids) for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of rows that compute more than one, but for drafts."""
        return sum(row.end - row.start for row in self.rows if row.end - row.start > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device answered.

    Attributes:
        token_ids_by_request: what every row brought that samples and did not fail: the drawn token, those drawn behind
            what its draft had right, and behind each those that a grammar leaves no choice of.
        error_by_request: rows that failed alone (NaN logits), with one sentence each.
        unfollowable: those of them that their grammars have failed.
        logprobs_by_request: of each of them, where they are asked for.
        prompt_logprobs_by_request: of rows that score: of the prompt tokens that follow their positions.
        pooled_by_request: the vectors of requests that asked for one and are computed; as `Emission.pooled`.
    """

    step_id: int
    token_ids_by_request: dict[RequestId, tuple[int, ...]]
    error_by_request: dict[RequestId, str]
    unfollowable: frozenset[RequestId] = frozenset()
    logprobs_by_request: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs_by_request: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    pooled_by_request: dict[RequestId, bytes] = field(default_factory=dict)
