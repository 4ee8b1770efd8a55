"""The interface between the scheduler (pure) and the runner (tensors): one plan down, one result up.

There is no prefill mode and no decode mode. A request has been computed up to one position and has known tokens up to
another; a row of the plan computes a half-open range in between:

    tokens      0 ........ start ............ end ........ num_tokens
                [ in cache )[ computed by this step )[ a later chunk )

A row samples exactly when `end == num_tokens`, that is when its last known token is computed; a pooling request gets
its vector then instead. After that token the row may compute draft tokens: a token is sampled after each, as long as
the previous sample matches the draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from engine.request import Pooling, Request, RequestId, TokenLogprobs


def pairs_of(start: float, end: float) -> float:
    """Return the pairs of a token at a position in [start, end) and one before it."""
    return (end - start) * (start + end) / 2


class Snapshot(NamedTuple):
    """A recurrent state to keep, as it is after the tokens before `position`, in a `place` of `Snapshots`."""

    position: int
    place: int


class StepRow(NamedTuple):
    """One request's share of a step; a tuple for speed, as every step makes one per request.

    Attributes:
        row: index of the request in the runner's persistent buffers, held from admission until it ends or is preempted.
        is_admission: the request got the row in this step: its sampling state must be (re)built from `request` and
            `output_ids`.
        request: immutable; prompt, parameters, adapter.
        output_ids: tokens generated so far, including prior output (live view; read, never kept). The last may be
            `engine.scheduling.live_request.PENDING`: the previous step samples it, and only the device knows it yet.
        start: first position to compute; everything before it is in the cache.
        end: one past the last position to compute, without the draft; `start < end`.
        block_tables: the request's block tables, one per table of the cache's layout (live view), long enough for
            position `stop - 1`; the null block replaces blocks that no layer of a table reads any more.
        samples: whether a token is sampled for position `end`.
        scores: whether log-probabilities of the prompt tokens after each position of this row are computed.
        draft_ids: draft tokens, computed from `end` on as if already sampled. None of them ends the request, and its
            length limits leave room for a token sampled after them.
        state_from: for an admission with recurrent layers: the place of the snapshot to continue from; None at the
            start of the sequence.
        snapshots: the states to keep at positions after `start` and up to `end`, in ascending order.
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
        """One past the last position to compute, including the draft."""
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
        return int(self.request.pooling is not None and self.ends_prompt)

    @property
    def ends_prompt(self) -> bool:
        """Whether this row computes the last token of prompt and prior output."""
        return self.end == self.request.num_given

    @property
    def first_token_id(self) -> int:
        """Token id at position `start`."""
        prompt = self.request.prompt_ids
        split = len(prompt)
        return prompt[self.start] if self.start < split else self.output_ids[self.start - split]

    def token_ids(self) -> list[int]:
        """Return the token ids at positions [start, stop)."""
        prompt = self.request.prompt_ids
        split = len(prompt)
        ids = list(prompt[self.start : min(self.end, split)])
        if self.end > split:
            ids.extend(self.output_ids[max(self.start, split) - split : self.end - split])
        ids.extend(self.draft_ids)
        return ids


class StateMoves(NamedTuple):
    """The recurrent states that a step copies.

    Attributes:
        begun: (row, place) of each state to restore, before anything else.
        kept: the snapshots to take, by row, when it reaches their positions; a place may be one of those in `begun`.
    """

    begun: tuple[tuple[int, int], ...]
    kept: Mapping[int, Sequence[Snapshot]]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The work of one step. Rows of one token come before longer ones; in each group one adapter's rows are adjacent.

    Attributes:
        step_id: counts up from 1.
        rows: distinct requests, at most `ResolvedConfig.num_rows`.
        released_rows: row indices freed since the last plan (ended, cancelled or preempted).
        is_speculative: drafts are enabled: the next step may compute some after the tokens sampled in this one.
        drafting_s: seconds for which a draft model was used while this was planned.
    """

    step_id: int
    rows: tuple[StepRow, ...]
    released_rows: tuple[int, ...] = ()
    is_speculative: bool = False
    drafting_s: float = 0.0

    @cached_property
    def num_tokens(self) -> int:
        """Size of the batch in tokens; at most `max_batched_tokens`."""
        return sum(row.num_tokens for row in self.rows)

    @cached_property
    def num_decodes(self) -> int:
        """Number of rows of one token."""
        return sum(row.num_tokens == 1 for row in self.rows)

    @cached_property
    def has_pooled(self) -> bool:
        """Whether some row belongs to a pooling request."""
        return any(row.request.pooling is not None for row in self.rows)

    @cached_property
    def state_moves(self) -> StateMoves | None:
        """The recurrent states to copy; None for none."""
        begun = tuple((row.row, row.state_from) for row in self.rows if row.state_from is not None)
        kept = {row.row: row.snapshots for row in self.rows if row.snapshots}
        return StateMoves(begun, kept) if begun or kept else None

    @property
    def needs_results(self) -> bool:
        """Whether the next step can be planned only when the results of this one are known."""
        return self.is_speculative or any(row.scores or row.request.params.is_followed for row in self.rows)

    @cached_property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens of all rows."""
        return sum(len(row.draft_ids) for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens of rows that compute more than one, without drafts."""
        return sum(row.end - row.start for row in self.rows if row.end - row.start > 1)

    @property
    def num_prefill_pairs(self) -> float:
        """Number of pairs of one of these tokens and one before it in its request."""
        return sum(pairs_of(row.start, row.end) for row in self.rows if row.end - row.start > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step.

    Attributes:
        token_ids_by_request: for each row that samples and did not fail: the sampled token, those sampled after
            accepted draft tokens, and after each the tokens that a grammar forces.
        error_by_request: rows that failed individually (NaN logits), with one sentence each.
        unfollowable: the failed requests whose grammar failed.
        logprobs_by_request: log-probabilities of the tokens in `token_ids_by_request`, if requested.
        prompt_logprobs_by_request: for rows that score, of the prompt token after each of their positions.
        pooled_by_request: vectors of pooling requests that are complete; as `Emission.pooled`.
    """

    token_ids_by_request: dict[RequestId, tuple[int, ...]]
    error_by_request: dict[RequestId, str]
    unfollowable: frozenset[RequestId] = frozenset()
    logprobs_by_request: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs_by_request: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    pooled_by_request: dict[RequestId, bytes] = field(default_factory=dict)
