"""Decides what each step computes. One token budget, no prefill mode and no decode mode.

    plan:    running decodes -> running prefills -> admissions, until the budget, the rows or the blocks are spent
    commit:  what the step computed becomes fact: blocks get names, tokens are emitted, requests end

Guarantees, all held by property tests: the budget is never exceeded; a block is shared only by equal prefixes of one
adapter and salt; whatever ends, in any way and at any moment, returns its blocks, row and adapter pin; every request
ends. The last rests on three bounds: among running requests the least recently served goes first; a waiting request
gains one priority level every `AGEING_STEPS` plans; one that was skipped `MAX_SKIPS` times for want of an adapter slot
lets no other adapter in before it.

Pure: standard library only; not thread-safe, the engine's thread owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.blocks import BlockId, BlockPool
from engine.config import ResolvedConfig
from engine.errors import RequestError
from engine.live_request import LiveRequest
from engine.metrics import SchedulerCounters
from engine.ports import AdapterGate
from engine.prefix_index import PrefixIndex
from engine.request import Emission, FinishReason, Request, RequestId
from engine.step import StepPlan, StepResult, StepRow

AGEING_STEPS = 512
MAX_SKIPS = 64
DEADLINE_PASSED = "The request's deadline passed before its answer was complete."


class Scheduler:
    """Requests waiting and running, and the blocks and rows they hold.

    Args:
        eos_ids: token ids that end a generation unless the request ignores them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        gate: AdapterGate,
        eos_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._gate = gate
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._index = PrefixIndex()
        self._pool = BlockPool(config.num_blocks, on_reuse=self._index.evict)
        self._live: dict[RequestId, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []
        self._running: list[LiveRequest] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._outbox: list[Emission] = []
        self._step_id = 0
        self._num_arrivals = 0
        self.counters = SchedulerCounters()

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is alive or any emission unread."""
        return bool(self._live or self._outbox)

    @property
    def kv_usage(self) -> float:
        """Share of the cache's blocks that requests hold, 0 to 1."""
        return self._pool.num_held / self._pool.num_blocks

    def validate(self, request: Request) -> None:
        """Check what can be known at once; touches no state, so that any thread may call it.

        Raises:
            RequestError: the request can never be served here.
        """
        limit = self._config.max_model_len
        num_known = len(request.prompt_ids) + len(request.prior_output_ids)
        if not request.prompt_ids:
            raise RequestError("The prompt is empty; at least 1 token is needed.", field="prompt")
        if num_known >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but the prompt has {num_known} tokens, which "
                "leaves no room for an answer.",
                field="messages",
                code="context_length_exceeded",
            )
        if request.params.max_tokens <= len(request.prior_output_ids):
            raise RequestError(f"max_tokens is {request.params.max_tokens}; at least 1 is needed.", field="max_tokens")
        longest = min(limit, len(request.prompt_ids) + request.params.max_tokens)
        capacity = self._config.num_blocks * self._config.block_tokens
        if longest > capacity:
            raise RequestError(
                f"Prompt and answer may take {longest} tokens, but the cache of this server holds {capacity}.",
                field="max_tokens",
                code="context_length_exceeded",
            )

    def add(self, request: Request) -> None:
        """Queue a validated request.

        Raises:
            RequestError: its id is alive already, or `validate` refuses it.
        """
        self.validate(request)
        if request.request_id in self._live:
            raise RequestError(f"A request with the id {request.request_id!r} is alive already.", field="request_id")
        live = LiveRequest(
            request=request,
            arrival=self._num_arrivals,
            queued_at_s=self._clock(),
            queued_at_step=self._step_id,
            output_ids=list(request.prior_output_ids),
        )
        self._num_arrivals += 1
        self._live[request.request_id] = live
        self._waiting.append(live)
        if request.adapter is not None:
            self._gate.prepare(request.adapter)

    def cancel(self, request_id: RequestId) -> None:
        """End a request now, wherever it is; an unknown id is one that has ended and is ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, FinishReason.CANCELLED)

    def fail_all(self, error: str) -> None:
        """End every request with FAILED; the device is gone."""
        for live in list(self._live.values()):
            self._end(live, FinishReason.FAILED, error=error)

    def drain(self) -> list[Emission]:
        """Hand over the emissions gathered so far."""
        emissions, self._outbox = self._outbox, []
        return emissions

    def plan(self) -> StepPlan | None:
        """Return the work of the next step, or None where nothing can run now."""
        self._expire()
        self._step_id += 1
        draft = _Draft(self._config.max_batched_tokens)
        num_preemptions = self.counters.num_preemptions
        for live in sorted(self._running, key=lambda r: (r.num_wanted > 1, r.last_step, r.arrival)):
            self._serve_running(live, draft)
        if self.counters.num_preemptions == num_preemptions:
            self._admit(draft)
        if not draft.end_by_request:
            return None
        rows = tuple(self._row(live, end, is_admission) for live, end, is_admission in draft.ordered())
        released, self._released_rows = tuple(self._released_rows), []
        return StepPlan(step_id=self._step_id, rows=rows, released_rows=released)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Turn a finished step into facts and return what it, and everything since the last call, brought."""
        now = self._clock()
        for row in plan.rows:
            live = self._live.get(row.request.request_id)
            if live is None or live.row != row.row:
                continue
            error = result.error_by_request.get(row.request.request_id)
            if error is not None:
                # Its blocks stay unnamed: what a failed step wrote must not be shared.
                self._end(live, FinishReason.FAILED, error=error)
                continue
            live.num_computed = row.end
            live.last_step = plan.step_id
            self._name_blocks(live, row.start, row.end)
            if row.samples:
                self._append(live, result.token_id_by_request[row.request.request_id], now)
        return self.drain()

    def check(self) -> None:
        """Raise AssertionError unless blocks, rows and queues agree; for tests and idle moments."""
        self._pool.check()
        self._index.check(self._pool)
        held: dict[int, int] = {}
        for live in self._running:
            assert live.row is not None, "a running request has no row"
            assert len(live.blocks) * self._config.block_tokens >= live.num_computed, "computed beyond its blocks"
            for block in live.blocks:
                held[block] = held.get(block, 0) + 1
        for live in self._waiting:
            assert live.row is None, "a waiting request has a row"
            assert not live.blocks, "a waiting request holds blocks"
        for block in map(BlockId, range(self._pool.num_blocks)):
            assert self._pool.ref_count(block) == held.get(block, 0), f"block {block} is counted wrongly"
        rows = [live.row for live in self._running]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows) == self._config.max_num_seqs
        assert len(self._live) == len(self._running) + len(self._waiting), "a request is in no queue"

    def _expire(self) -> None:
        now = self._clock()
        late = [r for r in self._live.values() if r.request.deadline_s is not None and r.request.deadline_s <= now]
        for live in late:
            self._end(live, FinishReason.FAILED, error=DEADLINE_PASSED)

    def _serve_running(self, live: LiveRequest, draft: _Draft) -> None:
        """Give a running request its share of the budget, pre-empting others where it needs a block."""
        if live.row is None:
            return
        count = self._share(live, draft)
        if count == 0:
            return
        end = live.num_computed + count
        while len(live.blocks) * self._config.block_tokens < end:
            taken = self._pool.try_take(1)
            if taken is not None:
                live.blocks.extend(taken)
                continue
            victim = max(self._running, key=lambda r: (r.request.priority, r.arrival))
            draft.drop(victim)
            self._preempt(victim)
            if victim is live:
                return
        draft.put(live, end, is_admission=False)

    def _share(self, live: LiveRequest, draft: _Draft) -> int:
        """Return how many tokens the request may compute in this step."""
        budget = draft.budget
        cap = self._config.max_prefill_tokens_with_decodes
        if live.num_wanted > 1 and cap is not None and draft.num_decodes:
            budget = min(budget, max(0, cap - draft.num_prefill_tokens))
        return min(live.num_wanted, budget)

    def _admit(self, draft: _Draft) -> None:
        """Give rows to waiting requests, best effective priority first, then first come first served."""
        reserved = False
        for live in sorted(self._waiting, key=self._rank):
            if not self._free_rows or self._share(live, draft) == 0:
                return
            digest = live.request.adapter
            if digest is not None:
                error = self._gate.error(digest)
                if error is not None:
                    self._end(live, FinishReason.FAILED, error=error)
                    continue
                if reserved or not self._gate.try_pin(digest):
                    live.num_skips += self._gate.waits_for_slot(digest)
                    reserved = reserved or live.num_skips > MAX_SKIPS
                    continue
            if not self._try_place(live):
                # No smaller request overtakes it, or a large one would wait for ever.
                if digest is not None:
                    self._gate.unpin(digest)
                return
            draft.put(live, live.num_computed + self._share(live, draft), is_admission=True)

    def _rank(self, live: LiveRequest) -> tuple[int, int]:
        age = (self._step_id - live.queued_at_step) // AGEING_STEPS
        return live.request.priority - age, live.arrival

    def _try_place(self, live: LiveRequest) -> bool:
        """Take a row and the blocks of all known tokens, shared ones first; False changes nothing."""
        block_tokens = self._config.block_tokens
        shared = []
        if self._config.enable_prefix_cache:
            # The last token is always computed: its logits are what the next one is drawn from.
            shared = self._index.match(live.names_of((live.num_tokens - 1) // block_tokens, block_tokens))
        num_new = -(-live.num_tokens // block_tokens) - len(shared)
        num_revived = sum(self._pool.ref_count(block) == 0 for block in shared)
        # One block in reserve for each running request keeps an admission from forcing a pre-emption at once.
        if num_new + num_revived + len(self._running) > self._pool.num_free and self._running:
            return False
        for block in shared:
            self._pool.share(block)
        taken = self._pool.try_take(num_new)
        if taken is None:
            self._pool.release(shared)
            return False
        live.blocks = [*shared, *taken]
        live.num_computed = len(shared) * block_tokens
        live.row = self._free_rows.pop()
        self._waiting.remove(live)
        self._running.append(live)
        self._count_admission(live)
        return True

    def _count_admission(self, live: LiveRequest) -> None:
        self.counters.prefix_queries += live.num_tokens
        self.counters.prefix_hits += live.num_computed
        if live.num_cached_tokens is None:
            live.num_cached_tokens = min(live.num_computed, len(live.request.prompt_ids))
            live.admitted_at_s = self._clock()
            self.counters.prompt_tokens += len(live.request.prompt_ids)

    def _row(self, live: LiveRequest, end: int, is_admission: bool) -> StepRow:
        assert live.row is not None
        return StepRow(
            row=live.row,
            is_admission=is_admission,
            request=live.request,
            output_ids=live.output_ids,
            start=live.num_computed,
            end=end,
            block_ids=live.blocks,
            samples=end == live.num_tokens,
        )

    def _name_blocks(self, live: LiveRequest, start: int, end: int) -> None:
        """Index the blocks that the range [start, end) has filled."""
        if not self._config.enable_prefix_cache:
            return
        first, last = start // self._config.block_tokens, end // self._config.block_tokens
        if last > first:
            names = live.names_of(last, self._config.block_tokens)
            for i in range(first, last):
                self._index.insert(names[i], live.blocks[i])

    def _append(self, live: LiveRequest, token_id: int, now: float) -> None:
        live.output_ids.append(token_id)
        live.first_token_at_s = live.first_token_at_s or now
        self.counters.generation_tokens += 1
        reason = live.finish_after(token_id, self._eos_ids, self._config.max_model_len)
        if reason is not None:
            self._end(live, reason, token_ids=(token_id,))
            return
        self._outbox.append(
            Emission(
                request_id=live.request.request_id,
                token_ids=(token_id,),
                num_cached_tokens=live.num_cached_tokens or 0,
            )
        )

    def _preempt(self, live: LiveRequest) -> None:
        """Send a running request back to wait; it will be computed anew, mostly from the prefix cache."""
        self._release(live)
        self._waiting.append(live)
        self.counters.num_preemptions += 1

    def _end(
        self, live: LiveRequest, reason: FinishReason, *, token_ids: tuple[int, ...] = (), error: str | None = None
    ) -> None:
        """Return all that the request holds and emit its end."""
        if live.row is None:
            self._waiting.remove(live)
        else:
            self._release(live)
        del self._live[live.request.request_id]
        self.counters.count_end(live, reason, self._clock())
        self._outbox.append(
            Emission(
                request_id=live.request.request_id,
                token_ids=token_ids,
                finish_reason=reason,
                num_cached_tokens=live.num_cached_tokens or 0,
                error=error,
            )
        )

    def _release(self, live: LiveRequest) -> None:
        assert live.row is not None
        self._running.remove(live)
        self._pool.release(live.blocks)
        live.blocks = []
        live.num_computed = 0
        self._free_rows.append(live.row)
        self._released_rows.append(live.row)
        live.row = None
        if live.request.adapter is not None:
            self._gate.unpin(live.request.adapter)


class _Draft:
    """A plan in the making: how far each request is to be computed, and what is left of the budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_decodes = 0
        self.num_prefill_tokens = 0
        self.end_by_request: dict[RequestId, tuple[LiveRequest, int, bool]] = {}

    def put(self, live: LiveRequest, end: int, *, is_admission: bool) -> None:
        """Schedule a request up to `end`."""
        self.end_by_request[live.request.request_id] = (live, end, is_admission)
        self._count(live, end, 1)

    def drop(self, live: LiveRequest) -> None:
        """Take a request out again, if it is in."""
        entry = self.end_by_request.pop(live.request.request_id, None)
        if entry is not None:
            self._count(live, entry[1], -1)

    def ordered(self) -> list[tuple[LiveRequest, int, bool]]:
        """Return the entries as a plan's rows stand: single tokens first, one adapter's rows side by side."""
        return sorted(
            self.end_by_request.values(),
            key=lambda e: (e[1] - e[0].num_computed > 1, e[0].request.adapter or "", e[0].arrival),
        )

    def _count(self, live: LiveRequest, end: int, sign: int) -> None:
        count = end - live.num_computed
        self.budget -= sign * count
        if live.num_wanted == 1:
            self.num_decodes += sign
        else:
            self.num_prefill_tokens += sign * count
