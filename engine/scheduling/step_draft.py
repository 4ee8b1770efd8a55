"""A step's plan in the making: how far each request is to be computed, and what is left of the token budget."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import ResolvedConfig
from engine.scheduling.live_request import LiveRequest
from engine.step import StepRow


class StepDraft:
    """The budget of one step and what has been given out of it.

    Args:
        prefill_cap: prompt tokens that the step may compute if it has decodes too.

    Attributes:
        num_decodes: requests in it that compute one token of output.
        num_prompt_tokens: tokens of prompts in it, and others that were known before they are computed.
    """

    def __init__(self, config: ResolvedConfig, prefill_cap: int) -> None:
        self._budget = config.max_batched_tokens
        self._prefill_cap = prefill_cap
        self.num_decodes = 0
        self.num_prompt_tokens = 0
        # Rows of logits that the runner's buffers have room for: one for each row, more for scores and drafts.
        self._num_free_logits = config.num_logits
        self._end_by_live: dict[LiveRequest, int] = {}
        self._admissions: set[LiveRequest] = set()
        self._draft_by_live: dict[LiveRequest, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Tokens with logits that there is still room for."""
        return min(self._budget, self._num_free_logits)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be computed."""
        return not self._end_by_live

    def share(self, live: LiveRequest) -> int:
        """Return how many tokens the request may compute beyond those it has in the draft; 0 where nothing is left.

        Decodes are drafted first, so that it is known by the first prefill whether the step has any.
        """
        num_drafted = self._num_drafted(live)
        if not (num_drafted or self._num_free_logits):
            return 0
        budget = self._budget
        if live.num_wanted > 1 and self.num_decodes:
            budget = min(budget, self._prefill_cap - self.num_prompt_tokens)
        if live.wants_scores:
            budget = min(budget, self._num_free_logits)
        return max(0, min(live.num_wanted - num_drafted, budget))

    def put(self, live: LiveRequest, *, is_admission: bool) -> None:
        """Let a request compute its share, at least one token."""
        count, num_drafted = self.share(live), self._num_drafted(live)
        assert count > 0, "a request without a share is in the draft"
        self._end_by_live[live] = live.num_computed + num_drafted + count
        if is_admission:
            self._admissions.add(live)
        self._budget -= count
        if not num_drafted:
            self._num_free_logits -= count if live.wants_scores else 1
        if live.num_wanted == 1:
            self.num_decodes += 1
        else:
            self.num_prompt_tokens += count

    def put_decode(self, live: LiveRequest) -> None:
        """Let a request that decodes compute one token; `put` may add what a grammar has left it no choice of."""
        assert self._budget > 0, "there are more decodes than budget"
        self._end_by_live[live] = live.num_computed + 1
        self._take_decode(live, 1)

    def drop_decode(self, live: LiveRequest) -> None:
        """Take it out again, if it is in."""
        if self._end_by_live.pop(live, None) is not None:
            self._take_decode(live, -1)

    def decoding(self) -> list[LiveRequest]:
        """Return the requests that decode and whose last known token the step computes."""
        ends = self._end_by_live.items()
        return [live for live, end in ends if live.is_decoding and end == live.num_tokens and not live.request.pooling]

    def put_draft(self, live: LiveRequest, draft_ids: Sequence[int]) -> None:
        """Let a request that decodes compute a draft behind its last token; there is room for it."""
        assert len(draft_ids) <= self.num_free, "a draft is over the budget"
        self._draft_by_live[live] = tuple(draft_ids)
        self._budget -= len(draft_ids)
        self._num_free_logits -= len(draft_ids)

    def rows(self) -> tuple[StepRow, ...]:
        """Return the plan's rows: those of a single token first; within each group one adapter's rows side by side."""
        # Drafted by rank, and so they stay where nothing else is to be said of their order.
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
        return self._end_by_live.get(live, live.num_computed) - live.num_computed

    def _take_decode(self, live: LiveRequest, count: int) -> None:
        """Take single tokens out of what is free; a negative number goes back."""
        self._budget -= count
        self._num_free_logits -= count
        if live.num_wanted == 1:
            self.num_decodes += count
