"""Decides what each step computes, with one token budget and no modes. Pure: standard library only.

    plan:     running decodes -> prefills and admissions by rank, until the budget, the rows or the blocks run out
    advance:  the plan is submitted: what it computes counts as computed, what it draws is pending
    commit:   the step is done: its blocks get names, tokens are emitted, requests end

Between `advance` and `commit` another step may be planned, so that a device need not wait for its host. Such a plan
takes no block and no row from a running request: `plan` returns None if it would have to.

Guarantees, all checked by property tests: the budget is never exceeded; a block is shared only by equal prefixes of one
adapter and salt; a request that ends, in any way and at any moment, returns its blocks, row and adapter pin; every
request ends. The last one rests on three bounds:

- Every decode runs in every step but the own steps of newcomers (`engine.scheduling.own_step`). Another step begins or
  ends between any two of these. A request enters the batch, and starts to decode, only in a step with a token of the
  budget for it beside all decodes. So there are never more decodes than budget.
- Every other order (admission, prefill, and in reverse preemption) follows the rank that a request got on arrival. It
  may lose rank once, to a flow with fewer rows than its share. The rank is the flow's turn
  (`engine.scheduling.fair_queue`), which virtual time reaches, with bounded head starts for priorities and for
  deadlines at risk (`Rank`). So only finitely many requests can ever come before it. A prompt of several steps leaves
  at most half of its share of each to shorter ones (`engine.scheduling.overtaking`).
- Once a request has been skipped `MAX_SKIPS` times because pinned adapters leave its own no slot or no memory, no
  adapter request that ranks behind it is admitted before it: the pins run out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from engine.config import ResolvedConfig
from engine.metrics import SchedulerCounters
from engine.ports import AdapterGate, BlockMover, Drafting
from engine.request import Emission, FinishReason, Request, RequestId
from engine.scheduling.admission import AdmissionControl
from engine.scheduling.backlog import BacklogReader
from engine.scheduling.beginnings import Beginnings
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.expected_hits import ExpectedHits
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.hopeless import hopeless
from engine.scheduling.lending import CacheLending
from engine.scheduling.live_request import BY_RANK, PENDING, Drawn, LiveRequest, flow_of, rank_of
from engine.scheduling.overtaking import in_turn
from engine.scheduling.own_step import OwnSteps, newcomers
from engine.scheduling.pins import Pins, is_ready
from engine.scheduling.row_shares import who_yields
from engine.scheduling.rows import Rows
from engine.scheduling.step_costs import StepCosts
from engine.scheduling.step_draft import StepDraft
from engine.speculation.speculation import Speculation
from engine.step import StepPlan, StepResult, StepRow
from engine.step_clock import StepClock


class Scheduler:
    """Waiting and running requests, and the blocks and rows they hold; owned by the engine's thread.

    Args:
        eos_ids: token ids that end a generation unless the request ignores them.
        clock: monotonic seconds.
        mover: copies blocks to and from the tiers below the cache; None if there are none.
        draft_model: guesses how answers go on; None if there is none.
        costs: what is known of this device's steps.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        gate: AdapterGate,
        eos_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        mover: BlockMover | None = None,
        draft_model: Drafting | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self._config, self._gate = config, gate
        self._eos_ids, self._clock = frozenset(eos_ids), clock
        self._tables = BlockTables(config, clock, mover)
        self._lending = CacheLending(config, self._tables, gate)
        self.landmarks, self.tiers = self._tables.landmarks, self._tables.tiers
        self._live: dict[RequestId, LiveRequest] = {}
        self._waiting, self._running = list[LiveRequest](), list[LiveRequest]()
        self._rows = Rows(config)
        self._outbox: list[Emission] = []
        self._num_plans = self._num_arrivals = self._num_under_way = 0
        self.step_clock = StepClock()
        self._fair_queue = FairQueue(num_rows=config.max_num_seqs, step_tokens=config.max_batched_tokens)
        self.counters = SchedulerCounters()
        self.expected_hits = ExpectedHits(config, lambda names: self._tables.num_had(names, self.admission.costs))
        reader = BacklogReader(config, self._fair_queue, self.expected_hits, self._running, self._waiting)
        self.admission = AdmissionControl(config, reader, lambda: self._tables.num_lent, costs)
        self._own_steps = OwnSteps(self.admission.costs, config.max_decode_gap_s)
        self._speculation = Speculation(config, self._eos_ids, self.admission.costs, self.counters, draft_model, clock)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def kv_usage(self) -> float:
        """Share of the cache's blocks that requests hold, 0 to 1."""
        return self._tables.usage

    def add(self, request: Request) -> None:
        """Queue a request that `check_request` has accepted; its id must not belong to a live request."""
        assert request.request_id not in self._live, "a request has the id of another"
        outlook = self.expected_hits.look(request)
        self.expected_hits.add(request, outlook)
        swap_s = 0.0 if request.adapter is None else self._gate.swap_s(request.adapter)
        tag = self._fair_queue.tag(
            flow_of(request),
            num_prompt=len(request.prompt_ids),
            max_output=request.params.max_tokens,
            swap_steps=self.admission.costs.steps(swap_s, len(self._running)),
        )
        live = LiveRequest(
            request=request,
            rank=rank_of(request.priority, tag=tag, arrival=self._num_arrivals),
            tag=tag,
            cost=self._fair_queue.next_tag(flow_of(request)) - tag,
            queued_at_s=self._clock(),
            output_ids=list(request.prior_output_ids),
            num_own=outlook.num_own,
            names=list(outlook.names),
        )
        self._num_arrivals += 1
        self._live[request.request_id] = live
        self._waiting.append(live)
        if request.adapter is not None:
            self._gate.prepare(request.adapter)

    def cancel(self, request_id: RequestId) -> None:
        """End a request now, waiting or running; ignore an unknown id, whose request has ended."""
        if (live := self._live.get(request_id)) is not None:
            self._end(live, FinishReason.CANCELLED)

    def fail_all(self, error: str) -> None:
        """End every request with FAILED after a device failure."""
        for live in [*self._live.values()]:
            self._end(live, FinishReason.FAILED, error=error)

    def drain(self) -> list[Emission]:
        """Return and clear the emissions gathered so far."""
        emissions, self._outbox = self._outbox, []
        return emissions

    def plan(self, prefill_cap: int | None = None) -> StepPlan | None:
        """Return the work of the next step, or None if nothing can run, at least until a step in flight is committed.

        Args:
            prefill_cap: limit of prompt tokens in a step that also decodes, in addition to the configured one.
        """
        self._end_hopeless()
        if not self._yield_rows():
            return None
        self._lending.offer()
        self._tables.bring_back(self._waiting, len(self._running), self.admission.costs)
        if (own := self.plan_newcomers(prefill_cap, num_spared=1)) is not None:
            return own
        draft = StepDraft(self._config, prefill_cap)
        if not self._serve_decodes(draft):
            return None
        self._serve_prefills(draft)
        self._speculation.extend(draft, self._tables, len(self._running))
        return self._planned(draft, is_own=False)

    def plan_newcomers(self, prefill_cap: int | None = None, *, num_spared: int = 2) -> StepPlan | None:
        """Return a step of only newcomers' short prompts (`engine.scheduling.own_step`), or None if none is due.

        It preempts no request, and may run before the rest of a paused step. `num_spared` as for `OwnSteps.pays`.
        """
        if not self._own_steps.pays(self._running, self._waiting, num_spared):
            return None
        draft, pins = StepDraft(self._config, self._own_steps.cap(prefill_cap), is_own=True), Pins(self._gate)
        ready = [live for live in self._waiting if not self._tables.is_coming(live)]
        for live in newcomers(self._running, ready, draft, self._tables.num_to_compute):
            if live.row is not None:
                if not self._lending.try_extend(live):
                    break
                draft.put(live, is_admission=False)
            elif not self._rows.is_left_for_newcomer or (pins.try_pin(live) and not self._try_admit(live, draft, pins)):
                break
        return self._planned(draft, is_own=True)

    def is_newcomer(self, request: Request) -> bool:
        """Whether a request that is not added yet might get an own step at once; any thread."""
        return self._own_steps.may_be and flow_of(request) not in {flow_of(live.request) for live in [*self._running]}

    def _planned(self, draft: StepDraft, *, is_own: bool) -> StepPlan | None:
        if draft.is_empty:
            return None
        self._own_steps.note(draft.num_decodes, draft.num_prompt_tokens, draft.num_pairs, is_own=is_own)
        self._num_plans += 1
        self._fair_queue.note_step()
        self.step_clock.begin(self._num_plans, self._clock())
        rows, released = self._tables.with_states(draft.rows(), self._live), self._rows.released()
        is_on, spent_s = self._speculation.is_on, draft.drafting_s
        return StepPlan(
            step_id=self._num_plans, rows=rows, released_rows=released, is_speculative=is_on, drafting_s=spent_s
        )

    def advance(self, plan: StepPlan) -> None:
        """Count a plan's work as done once it is submitted to the device, which computes plans in order."""
        self._num_under_way += 1
        for row in plan.rows:
            live = self._live[row.request.request_id]
            live.num_computed = row.end
            if row.samples:
                live.output_ids.append(PENDING)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Apply a finished step's result and return all emissions since the last call."""
        now_s = self._clock()
        self._num_under_way -= 1
        # If nothing is in flight, but there were later steps, the rest of this one came after an own step.
        self._own_steps.may_be |= not self._num_under_way and plan.step_id < self._num_plans
        self.step_clock.end(plan, now_s)
        # In reverse, because prompts are the last rows: first tokens are emitted before those of running streams.
        for row in reversed(plan.rows):
            request_id = row.request.request_id
            live = self._live.get(request_id)
            # The request may have ended meanwhile, and another one may have its id by now.
            if live is None or live.request is not row.request:
                continue
            live.notes.note(row, self.step_clock, live.queued_at_s)
            if (error := result.error_by_request.get(request_id)) is not None:
                # What it has computed must not be shared, in earlier steps either: only rows that draw are looked at.
                is_grammar = request_id in result.unfollowable
                self._end(live, FinishReason.UNFOLLOWABLE if is_grammar else FinishReason.FAILED, error=error)
                continue
            self._tables.settle(live, row.start, row.end, row.snapshots)
            if row.scores:
                live.prompt_logprobs.extend(result.prompt_logprobs_by_request.get(request_id, ()))
            if row.samples:
                self._fill_in(live, row, result, now_s)
            elif request_id in result.pooled_by_request:
                self._end(live, FinishReason.STOP, pooled=result.pooled_by_request[request_id])
        self._tables.drop_unsettled(plan.rows)
        return self.drain()

    def check(self) -> None:
        """Raise AssertionError unless blocks, rows and queues agree; for tests and idle moments."""
        self._tables.check(self._running)
        assert all(not live.tables and live.row is None for live in self._waiting), "a waiting request holds something"
        self._rows.check(self._running)
        assert {*self._live.values()} == {*self._running, *self._waiting}, "a request is in no queue"
        assert len(self._live) == len(self._running) + len(self._waiting), "a request is in two queues"

    def _end_hopeless(self) -> None:
        """End requests that miss their deadline or cannot get their adapter; hurry waiting ones that may miss it."""
        requests, now_s = [*self._live.values()], self._clock()
        for live, reason, error in hopeless(requests, self._gate, self.admission, len(self._running), now_s):
            self._end(live, reason, error=error)

    def _yield_rows(self) -> bool:
        """If every row is taken, preempt requests of flows above their share for waiting ones of flows below theirs.

        Returns False if that would preempt a request while a step is in flight.
        """
        if self._rows.is_left or not self._waiting:
            return True
        can_run = partial(is_ready, self._gate, self._tables.is_coming)
        for victim, behind in who_yields(self._running, self._waiting, self._config.max_num_seqs, can_run):
            if self._num_under_way:
                return False
            self._preempt(victim)
            victim.has_yielded = True
            victim.rank = max(victim.rank, behind.rank._replace(arrival=self._num_arrivals))
            self._num_arrivals += 1
        return True

    def _serve_decodes(self, draft: StepDraft) -> bool:
        """Give running requests blocks for their next step, preempting others if needed, and a token if they decode.

        Returns False if that would preempt a request while a step is in flight.
        """
        for live in sorted(self._running, key=BY_RANK):
            if live.row is None or live.is_full(self._config.max_model_len):
                continue
            while live.row is not None and not self._lending.try_extend(live):
                if self._num_under_way:
                    return False
                # Whoever ranks last is in no draft yet.
                self._preempt(max(self._running, key=BY_RANK))
            if live.row is not None and live.is_decoding:
                draft.put_decode(live)
        return True

    def _serve_prefills(self, draft: StepDraft) -> None:
        """Spend the rest of the budget by rank: on running prompts, forced tokens of decodes, and waiting requests.

        The first waiting request that finds no blocks ends admission: if smaller ones overtook it, a large one would
        wait forever.
        """
        candidates = [live for live in self._running if live.num_wanted > 1]
        candidates.extend(live for live in self._waiting if not self._tables.is_coming(live))
        pins, can_admit, costs = Pins(self._gate), True, self.admission.costs
        beginnings = Beginnings(self._config, costs, self._running, self._tables, has_streams=draft.num_decodes > 0)
        is_at_risk = partial(self.admission.is_at_risk, now_s=self._clock())
        for num, live in enumerate(in_turn(candidates, draft, self._rows, self._tables.num_lacking, is_at_risk)):
            if live.row is not None:
                draft.put(live, is_admission=False)
            elif not can_admit or not self._rows.is_left or beginnings.finds_more_later(live):
                continue
            elif beginnings.delays_others(live, len(candidates) - num):
                can_admit = False
            elif pins.try_pin(live):
                can_admit = self._try_admit(live, draft, pins)
            beginnings.note(live, draft.end_of(live))

    def _try_admit(self, live: LiveRequest, draft: StepDraft, pins: Pins) -> bool:
        """Give a waiting request with a pinned adapter a row, blocks and its share of the step.

        On False its adapter is unpinned again; nothing else changes, but lent blocks may have been reclaimed.
        """
        # A free block per request, or it might force a preemption in the very next step; alone it has the whole cache.
        spare = len(self._running) + 1 if self._running else 0
        if not self._lending.try_open(live, spare=spare):
            pins.undo(live)
            return False
        self._rows.take(live)
        draft.put(live, is_admission=True)
        self._fair_queue.note_service(live.tag)
        live.num_skips = 0
        self._waiting.remove(live)
        self._running.append(live)
        if live.begin_turn(self._clock()):
            self.counters.count_admission(live)
        return True

    def _fill_in(self, live: LiveRequest, row: StepRow, result: StepResult, now_s: float) -> None:
        """Replace the placeholder of a drawn token, and append the tokens that came with it."""
        request_id, index = live.request.request_id, row.end - len(live.request.prompt_ids)
        token_ids = result.token_ids_by_request[request_id]
        num_known = len(live.output_ids)
        assert live.output_ids[index] == PENDING, "a token is drawn twice"
        assert len(token_ids) == 1 or num_known == index + 1, "a token is drawn before those that come first"
        reason = live.put(index, token_ids, self._eos_ids, self._config.max_model_len)
        num_taken = 1 + len(live.output_ids) - num_known
        token_ids, logprobs = token_ids[:num_taken], result.logprobs_by_request.get(request_id, ())[:num_taken]
        num_right = self._speculation.commit(live, row, token_ids, self._tables)
        self.counters.generation_tokens += num_taken
        self.counters.forced_tokens += num_taken - 1 - num_right
        is_first = live.first_token_at_s is None
        drawn = Drawn(token_ids, logprobs, tuple(live.prompt_logprobs) if is_first else ())
        if is_first:
            live.first_token_at_s = now_s
        if reason is None:
            self._outbox.append(live.emission(drawn))
        else:
            self._end(live, reason, drawn)

    def _preempt(self, live: LiveRequest) -> None:
        """Return a running request to the queue; it will be recomputed, mostly from the prefix cache."""
        self._release(live)
        if live.wants_scores:
            live.prompt_logprobs.clear()  # All of them are recomputed.
        self._waiting.append(live)
        live.notes.begin_preemption(self._clock())
        self.counters.num_preemptions += 1

    def _end(
        self,
        live: LiveRequest,
        reason: FinishReason,
        drawn: Drawn | None = None,
        *,
        pooled: bytes | None = None,
        error: str | None = None,
    ) -> None:
        """Release all that the request holds and emit its end; tokens still being drawn for it are discarded."""
        live.drop_pending()
        if live.row is None:
            self._waiting.remove(live)
        else:
            self._release(live, is_sound=reason is not FinishReason.FAILED)
        del self._live[live.request.request_id]
        self.expected_hits.end(live.request.request_id)
        # Neither a pooled request nor one that had no turn, or was given up, tells how long the flow's answers are.
        is_whole = live.had_turn and live.request.pooling is None and reason.is_whole
        num_output = len(live.output_ids) if is_whole else None
        self._fair_queue.end(flow_of(live.request), num_output=num_output, unused=0.0 if live.had_turn else live.cost)
        self.counters.count_end(live, reason, self._clock())
        self._outbox.append(live.emission(drawn, reason=reason, pooled=pooled, error=error))

    def _release(self, live: LiveRequest, *, is_sound: bool = True) -> None:
        live.notes.stop_decoding(self.step_clock)
        self._running.remove(live)
        self._tables.close(live, is_sound=is_sound)
        self._rows.give_back(live)
        if live.request.adapter is not None:
            self._gate.unpin(live.request.adapter)
