"""Builds the plan of a step: how far each request is computed, and what is left of the token budget."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import ResolvedConfig
from engine.scheduling.live_request import LiveRequest
from engine.step import StepRow, pairs_of

KEPT_SHARE = 4
"""One of so many rows of logits is kept for requests that need one row each."""


class StepDraft:
    """The token budget of one step, and its allocation to requests.

    Args:
        bound: of `prefill_cap`, in addition to the configured one; None for none.
        is_own: the step has no decodes of others, but computes at most `prefill_cap` tokens nevertheless.

    Attributes:
        budget: tokens that a step may compute.
        prefill_cap: prompt tokens that the step may compute if it also decodes.
        num_left: tokens of the budget that are left, whether or not their logits fit.
        num_decodes: requests with a single token to compute, which may be the last of a prompt.
        num_prompt_tokens: tokens of all other requests: prompts, recomputed outputs, and tokens forced by a grammar.
        num_pairs: pairs of one of these tokens and one before it.
        num_held_back: tokens of the budget that no share has now.
        drafting_s: seconds for which a draft model was used.
    """

    def __init__(self, config: ResolvedConfig, bound: int | None, *, is_own: bool = False) -> None:
        bounds = bound, config.max_prefill_tokens_with_decodes, config.max_batched_tokens
        self.prefill_cap = min(bound for bound in bounds if bound is not None)
        self.budget = config.max_batched_tokens
        self.num_left = self.prefill_cap if is_own else self.budget
        self.num_held_back = 0
        self.num_decodes = 0
        self.num_prompt_tokens = 0
        self.num_pairs = 0.0
        self.drafting_s = 0.0
        # Rows of logits that fit in the runner's buffers: one per request, more for scores and draft tokens.
        self._num_free_logits = config.num_logits
        self._num_kept_logits = -(-config.max_num_seqs // KEPT_SHARE)
        self._end_by_live: dict[LiveRequest, int] = {}
        self._admissions: set[LiveRequest] = set()
        self._draft_by_live: dict[LiveRequest, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Tokens with logits that still fit in the step."""
        return min(self.num_left, self._num_free_logits)

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute."""
        return not self._end_by_live

    def share(self, live: LiveRequest) -> int:
        """Return how many more tokens the request may compute in this step; 0 if nothing is left.

        Decodes are added first, so that the first prefill already knows whether the step has any.
        """
        num_drafted = self._num_drafted(live)
        if not (num_drafted or self._num_free_logits):
            return 0
        budget = self.num_left
        if live.num_wanted > 1 and self.num_decodes:
            budget = min(budget, self.prefill_cap - self.num_prompt_tokens)
        if live.wants_scores:
            # All rows of logits, for as many steps as the prompt takes, would keep everyone else from being admitted.
            budget = min(budget, max(1, self._num_free_logits - self._num_kept_logits))
        return max(0, min(live.num_wanted - num_drafted, budget - self.num_held_back))

    def end_of(self, live: LiveRequest) -> int:
        """Return the number of the request's tokens that are computed once the step is done."""
        return self._end_by_live.get(live, live.num_computed)

    def put(self, live: LiveRequest, *, is_admission: bool) -> None:
        """Add a request's share, which must be at least one token."""
        count, num_drafted = self.share(live), self._num_drafted(live)
        assert count > 0, "a request without a share is in the draft"
        self._end_by_live[live] = live.num_computed + num_drafted + count
        if is_admission:
            self._admissions.add(live)
        self.num_left -= count
        if not num_drafted:
            self._num_free_logits -= count if live.wants_scores else 1
        if live.num_wanted == 1:
            self.num_decodes += 1
        else:
            self.num_prompt_tokens += count
            self.num_pairs += pairs_of(self._end_by_live[live] - count, self._end_by_live[live])

    def put_decode(self, live: LiveRequest) -> None:
        """Add one token of a decoding request; `put` may add the tokens that a grammar forces."""
        assert self.num_left > 0, "there are more decodes than budget"
        self._end_by_live[live] = live.num_computed + 1
        self.num_left -= 1
        self._num_free_logits -= 1
        if live.num_wanted == 1:
            self.num_decodes += 1

    def decoding(self) -> list[LiveRequest]:
        """Return the decoding requests whose last known token the step computes."""
        ends = self._end_by_live.items()
        return [live for live, end in ends if live.is_decoding and end == live.num_tokens and not live.request.pooling]

    def put_draft(self, live: LiveRequest, draft_ids: Sequence[int]) -> None:
        """Add draft tokens after a decoding request's last token; the caller ensures that they fit."""
        assert len(draft_ids) <= self.num_free, "a draft is over the budget"
        self._draft_by_live[live] = tuple(draft_ids)
        self.num_left -= len(draft_ids)
        self._num_free_logits -= len(draft_ids)

    def rows(self) -> tuple[StepRow, ...]:
        """Return the plan's rows: single-token rows first, and within each group rows of one adapter side by side."""
        # Added in order of rank, which the stable sort keeps among equals.
        rows = [self._row(live, end) for live, end in self._end_by_live.items()]
        if self._draft_by_live or len(rows) > self.num_decodes or any(row.request.adapter is not None for row in rows):
            rows.sort(key=lambda row: (row.num_tokens > 1, row.request.adapter or ""))
        return tuple(rows)

    def _row(self, live: LiveRequest, end: int) -> StepRow:
        assert live.row is not None, "a request without a row is in the draft"
        request = live.request
        return StepRow(
            row=live.row,
            is_admission=live in self._admissions,
            request=request,
            output_ids=live.output_ids,
            start=live.num_computed,
            end=end,
            block_tables=live.tables,
            samples=end == live.num_tokens and request.pooling is None,
            scores=live.wants_scores,
            draft_ids=self._draft_by_live.get(live, ()),
        )

    def _num_drafted(self, live: LiveRequest) -> int:
        return self.end_of(live) - live.num_computed
