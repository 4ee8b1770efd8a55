"""A step's plan in the making: how far each request is to be computed, and what is left of the token budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.request import RequestId
from engine.scheduling.live_request import LiveRequest
from engine.step import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    live: LiveRequest
    end: int
    is_admission: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.live.num_computed


class StepDraft:
    """The budget of one step and what has been given out of it.

    Args:
        prefill_cap: prompt tokens that the step may compute if it has decodes too; None for no bound of its own.
    """

    def __init__(self, config: ResolvedConfig, prefill_cap: int | None) -> None:
        self._budget = config.max_batched_tokens
        self._prefill_cap = prefill_cap
        self._num_decodes = 0
        self._num_prefill_tokens = 0
        # Rows of logits that the runner's buffers have room for: one for each row, more for one that scores.
        self._num_free_logits = config.max_num_seqs
        self._entry_by_id: dict[RequestId, _Entry] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be computed."""
        return not self._entry_by_id

    def share(self, live: LiveRequest) -> int:
        """Return how many tokens the request may compute beyond those it has in the draft; 0 where nothing is left.

        Decodes are drafted first, so that it is known by the first prefill whether the step has any.
        """
        num_drafted = self._num_drafted(live)
        if not (num_drafted or self._num_free_logits):
            return 0
        budget = self._budget
        if live.num_wanted > 1 and self._prefill_cap is not None and self._num_decodes:
            budget = min(budget, self._prefill_cap - self._num_prefill_tokens)
        if live.wants_scores:
            budget = min(budget, self._num_free_logits)
        return max(0, min(live.num_wanted - num_drafted, budget))

    def put(self, live: LiveRequest, *, is_admission: bool) -> None:
        """Let a request compute its share, at least one token."""
        count, num_drafted = self.share(live), self._num_drafted(live)
        assert count > 0, "a request without a share is in the draft"
        self._put(live, num_drafted + count, is_admission=is_admission)
        self._budget -= count
        if not num_drafted:
            self._num_free_logits -= count if live.wants_scores else 1
        if live.num_wanted == 1:
            self._num_decodes += 1
        else:
            self._num_prefill_tokens += count

    def put_decode(self, live: LiveRequest) -> None:
        """Let a request that decodes compute one token; `put` may add what a grammar has left it no choice of."""
        assert self._budget > 0, "there are more decodes than budget"
        self._put(live, 1, is_admission=False)
        self._take_decode(live, 1)

    def drop_decode(self, live: LiveRequest) -> None:
        """Take it out again, if it is in."""
        if self._entry_by_id.pop(live.request.request_id, None) is not None:
            self._take_decode(live, -1)

    def rows(self) -> tuple[StepRow, ...]:
        """Return the plan's rows: those of a single token first; within each group one adapter's rows side by side."""
        entries = sorted(
            self._entry_by_id.values(), key=lambda e: (e.num_tokens > 1, e.live.request.adapter or "", e.live.rank)
        )
        return tuple(_row(entry) for entry in entries)

    def _num_drafted(self, live: LiveRequest) -> int:
        entry = self._entry_by_id.get(live.request.request_id)
        return 0 if entry is None else entry.num_tokens

    def _put(self, live: LiveRequest, count: int, *, is_admission: bool) -> None:
        self._entry_by_id[live.request.request_id] = _Entry(
            live=live, end=live.num_computed + count, is_admission=is_admission
        )

    def _take_decode(self, live: LiveRequest, count: int) -> None:
        """Take single tokens out of what is free; a negative number goes back."""
        self._budget -= count
        self._num_free_logits -= count
        if live.num_wanted == 1:
            self._num_decodes += count


def _row(entry: _Entry) -> StepRow:
    live = entry.live
    assert live.row is not None, "a request without a row is in the draft"
    return StepRow(
        row=live.row,
        is_admission=entry.is_admission,
        request=live.request,
        output_ids=live.output_ids,
        start=live.num_computed,
        end=entry.end,
        block_ids=live.blocks,
        samples=entry.end == live.num_tokens and live.request.pooling is None,
        scores=live.wants_scores,
    )
