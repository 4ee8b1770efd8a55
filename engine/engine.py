"""The engine loop: plan, run, commit, emit. Any thread may add and cancel requests; all else runs on one thread.

The failure of one request is an emission; a failure of the device ends the engine and every request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import ResolvedConfig
from engine.errors import EngineError, RequestError
from engine.metrics import EngineLoad, EngineSnapshot, Sizes
from engine.request import Emission, FinishReason, Request, RequestId
from engine.scheduling.expected_hits import Outlook
from engine.scheduling.pacing import PrefillPace
from engine.scheduling.request_bounds import check_request
from engine.scheduling.scheduler import Scheduler
from engine.step import StepPlan
from engine.trace import RequestTrace

if TYPE_CHECKING:
    from engine.adapter_pool import AdapterPool
    from engine.runner import Runner
    from kernels.program import PauseFlag

_logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Maximum sleep of an engine without requests; a request wakes it at once."""

WAITING_POLL_S = 0.02
"""Maximum sleep while requests wait, for an adapter for instance; also how late an expired deadline is noticed."""


class Engine:
    """A scheduler and a runner, connected by a loop.

    Args:
        adapters: the adapters that are known or resident.
        close: called once when `run` returns, to stop background threads and free memory.
        arrival: set from any thread when a waiting request may be able to run, e.g. because its adapter has arrived.
        pause_wish: obeyed by the runner; None if it never pauses.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        runner: Runner,
        *,
        adapters: AdapterPool,
        close: Callable[[], None] = lambda: None,
        arrival: threading.Event | None = None,
        pause_wish: PauseFlag | None = None,
        compile_grammar: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self._runner = runner
        self.adapters = adapters
        self._close = close
        self.compile_grammar = compile_grammar
        """Compile a grammar before adding a request that uses it, which may take a while. Any thread.

        Raises `RequestError` if the grammar cannot be followed.
        """
        self._clock = clock
        self._lock = threading.Lock()
        # Requests are admitted one by one, as each is part of the next one's forecast. This needs its own lock: with
        # many waiting requests a forecast takes milliseconds, and every step needs `_lock`.
        self._door = threading.Lock()
        # One event for everything that ends a sleep. If it is set before the sleep, the loop plans once more.
        self._wake = arrival or threading.Event()
        self._pause_wish = pause_wish or threading.Event()
        self._inbox: deque[Request | RequestId] = deque()
        self._num_queued = 0
        self._live_ids: set[RequestId] = set()
        self._pace = PrefillPace(config.max_decode_gap_s, config.max_batched_tokens)
        self._is_stopping = False
        self._error: str | None = None
        self._step_requests, self._step_tokens = Sizes(), Sizes()
        self._num_ended = 0
        self._busy_s = 0.0
        self._last_progress_s = clock()
        self._under_way: deque[StepPlan] = deque()
        self._is_computing = False

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._error is None and not self._is_stopping

    @property
    def has_failed(self) -> bool:
        """Whether the engine has ended without being told to."""
        return self._error is not None and not self._is_stopping

    def add(self, request: Request) -> None:
        """Queue a request; any thread.

        Raises:
            RequestError: the request can never be served here, or its id is in use by a live request.
            OverloadError: it cannot be served in time, or the queue is full; see `engine.scheduling.admission`.
            EngineError: the engine has ended.
        """
        check_request(request, self.config)
        if request.params.grammar is not None:
            # Returns at once if it was compiled before. Left uncompiled, it would delay a step.
            self.compile_grammar(request.params.grammar)
        with self._door:
            self._check_alive()
            outlook = self._checked(request)
            with self._lock:
                self._check_alive()
                if request.request_id in self._live_ids:
                    raise RequestError(f"A request with the id {request.request_id!r} is alive.", field="request_id")
                self._live_ids.add(request.request_id)
                self._scheduler.expected_hits.add(request, outlook)
                self._inbox.append(request)
                self._num_queued += 1
                self._wake.set()
                if self._scheduler.is_newcomer(request):
                    self._pause_wish.set()

    def cancel(self, request_id: RequestId) -> None:
        """End a request before the next step; any thread. An unknown id is ignored."""
        with self._lock:
            # Of a request that has ended already, it would end the next one of the same id.
            if request_id in self._live_ids:
                self._inbox.append(request_id)
                self._wake.set()

    def step(self) -> list[Emission]:
        """Submit the next step, collect the results of the oldest, and return their emissions. Engine's thread only.

        With a runner that runs ahead, a step is in flight while the next is planned. The result is empty if nothing can
        run, or if the first of several steps has only been started. If newcomers were computed before a paused step, it
        returns their emissions and resumes that step on the next call.

        Raises:
            EngineError: the device failed; `run` ends every live request.
        """
        started_s = self._clock()
        emissions = [] if self._is_computing else self._begin()
        if self._is_computing:
            emissions += self._go_on()
        self._busy_s += self._clock() - started_s
        return emissions

    def _begin(self) -> list[Emission]:
        """Plan and submit a step; return the emissions of earlier ones."""
        self._wake.clear()
        self._read_inbox()
        emissions = self._collect() if self._under_way and self._under_way[-1].needs_results else []
        started_s = self._clock()
        if not (self._under_way or self._scheduler.num_running):
            self._scheduler.step_clock.rest(started_s)
        plan = self._scheduler.plan(self._pace.num_tokens)
        self._runner.times.schedule_s += self._clock() - started_s
        if plan is None:
            if self._under_way:
                emissions += self._collect()
            return emissions + self._count(self._scheduler.drain())
        self._runner.submit(plan)
        self._scheduler.advance(plan)
        self._under_way.append(plan)
        self._is_computing = True
        return emissions

    def _go_on(self) -> list[Emission]:
        """Compute the newest step in flight; return early if newcomers were computed before it."""
        while self._runner.proceed():
            emissions = self._serve_newcomers()
            if emissions:
                return emissions
        self._is_computing = False
        return self._collect() if len(self._under_way) > self._runner.steps_ahead else []

    def _serve_newcomers(self) -> list[Emission]:
        """Compute newcomers' short prompts before the paused step, and return their emissions."""
        self._read_inbox()
        plan = self._scheduler.plan_newcomers(self._pace.num_tokens)
        if plan is None:
            return []
        self._runner.submit(plan)
        self._scheduler.advance(plan)
        while self._runner.proceed():
            pass
        return self._complete(plan)

    def _collect(self) -> list[Emission]:
        """Wait for the oldest step in flight and return its emissions."""
        return self._complete(self._under_way.popleft())

    def _complete(self, plan: StepPlan) -> list[Emission]:
        """Wait for the results of a step, commit them and return the emissions."""
        started_s = self._clock()
        result = self._runner.collect()
        ran_s = self._clock()
        emissions = self._scheduler.commit(plan, result)
        self._learn(plan, ran_s)
        self._step_requests.add(len(plan.rows))
        self._step_tokens.add(plan.num_tokens)
        self._last_progress_s = self._clock()
        self._runner.times.wait_s += ran_s - started_s
        self._runner.times.emit_s += self._last_progress_s - ran_s
        return self._count(emissions)

    def _learn(self, plan: StepPlan, now_s: float) -> None:
        """Learn from the time of a finished step how long later ones take."""
        clock, num_prefill_tokens = self._scheduler.step_clock, plan.num_prefill_tokens
        self._pace.observe(num_prefill_tokens, clock.step_s)
        self._scheduler.admission.costs.observe(
            num_decodes=plan.num_tokens - num_prefill_tokens - plan.num_draft_tokens,
            num_prompt_tokens=num_prefill_tokens,
            num_pairs=plan.num_prefill_pairs,
            num_draft_tokens=plan.num_draft_tokens,
            # Includes the host's work between two steps, but not that of a draft model, which is weighed by itself.
            took_s=clock.whole_s - plan.drafting_s,
            now_s=now_s,
        )

    def run(self, on_emissions: Callable[[list[Emission]], None]) -> None:
        """Step until `stop`, passing on each step's emissions; sleep while there is nothing to do."""
        try:
            while not self._is_stopping:
                emissions = self.step()
                if emissions:
                    on_emissions(emissions)
                elif not self._scheduler.num_running:
                    self._sleep()
            self._finish(on_emissions, "The engine is shutting down.")
        except Exception as error:
            # Last resort of the thread: otherwise clients would wait forever for an engine that no longer steps.
            _logger.exception("the engine has failed")
            self._finish(on_emissions, f"The engine has failed ({type(error).__name__}).")
        finally:
            self._close()

    def stop(self) -> None:
        """Make `run` return after the current step; live requests end with FAILED. Any thread."""
        with self._lock:
            self._is_stopping = True
            self._wake.set()

    def traces(self, request_ids: Iterable[RequestId]) -> dict[RequestId, RequestTrace]:
        """Return the traces of requests that ended recently; any thread."""
        known = self._scheduler.counters.trace_by_id
        return {request_id: trace for request_id in request_ids if (trace := known.get(request_id)) is not None}

    def snapshot(self, *, drain_ended: bool = False) -> EngineSnapshot:
        """Return the engine's metrics; any thread. With `drain_ended` each ended request is returned only once."""
        counters = self._scheduler.counters
        ended = []
        while drain_ended and counters.ended:
            ended.append(counters.ended.popleft())
        return EngineSnapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + self._num_queued,
            step_requests=self._step_requests.copy(),
            step_tokens=self._step_tokens.copy(),
            last_progress_s=self._last_progress_s,
            kv_usage=self._scheduler.kv_usage,
            num_blocks=self.config.num_blocks // len(self.config.windows),
            block_tokens=self.config.block_tokens,
            counters=replace(counters, ended_by_reason=dict(counters.ended_by_reason)),
            refused_by_reason=dict(self._scheduler.admission.refused_by_reason),
            step_times=replace(self._runner.times),
            num_resident_adapters=self.adapters.num_resident(),
            adapter_loads=replace(self.adapters.loads),
            stored_tokens=self._scheduler.tiers.num_stored_blocks * self.config.block_tokens,
            fetched_tokens=self._scheduler.tiers.num_fetched_blocks * self.config.block_tokens,
            ended=tuple(ended),
        )

    def load(self) -> EngineLoad:
        """Return the load that a new request would meet; any thread."""
        landmarks = self._scheduler.landmarks
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting + self._num_queued
        return EngineLoad(
            queued_tokens=self._scheduler.admission.reader.unread_tokens(self._unread()),
            num_running=num_running,
            num_waiting=num_waiting,
            max_running=self.config.max_num_seqs,
            prefill_tokens_per_s=self._scheduler.admission.costs.prompt_tokens_per_s,
            step_s=self._scheduler.step_clock.step_s,
            stalled_s=max(0.0, self._clock() - self._last_progress_s) if num_running + num_waiting else 0.0,
            num_ended=self._num_ended,
            block_tokens=self.config.block_tokens,
            landmark_blocks=landmarks.stride_blocks if self.config.enable_prefix_cache else 0,
            landmarks=landmarks.copy(),
        )

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineError(self._error or "The engine is shutting down.")

    def _unread(self) -> list[Request]:
        with self._lock:
            return [entry for entry in self._inbox if isinstance(entry, Request)]

    def _read_inbox(self) -> None:
        """Process the inbox: while a step is computed only new requests, as cancellations would free its rows."""
        self._pause_wish.clear()
        with self._lock:
            entries, self._inbox = self._inbox, deque()
            if self._is_computing:
                self._inbox.extend(entry for entry in entries if not isinstance(entry, Request))
                entries = deque(entry for entry in entries if isinstance(entry, Request))
        # Outside the lock: preparing an adapter takes other locks.
        for entry in entries:
            if isinstance(entry, Request):
                self._scheduler.add(entry)
                # One by one: until then it counts twice, and a burst that did would fill the queue at half its size.
                with self._lock:
                    self._num_queued -= 1
            else:
                self._scheduler.cancel(entry)

    def _sleep(self) -> None:
        while not self._is_stopping and not self._wake.is_set() and self._runner.idle():
            pass
        if not self._is_stopping:
            self._wake.wait(WAITING_POLL_S if self._scheduler.num_waiting else IDLE_POLL_S)
        self._last_progress_s = self._clock()

    def _finish(self, on_emissions: Callable[[list[Emission]], None], reason: str) -> None:
        """Refuse new requests and end every live one, even if it was the scheduler that failed."""
        with self._lock:
            self._error = self._error or reason
            self._inbox.clear()
            self._num_queued = 0
        try:
            self._scheduler.fail_all(reason)
        except Exception:
            # Requests that it misses are answered below; otherwise their clients would wait forever.
            _logger.exception("the scheduler could not end its requests")
        emissions = self._count(self._scheduler.drain())
        with self._lock:
            forgotten, self._live_ids = self._live_ids, set()
        emissions += [
            Emission(request_id=request_id, finish_reason=FinishReason.FAILED, error=reason) for request_id in forgotten
        ]
        if emissions:
            on_emissions(emissions)

    def _count(self, emissions: list[Emission]) -> list[Emission]:
        ended = [emission.request_id for emission in emissions if emission.finish_reason is not None]
        if ended:
            with self._lock:
                self._live_ids.difference_update(ended)
                # What is left to cancel would end the next request of the same id, which may be read before it.
                self._inbox = deque(entry for entry in self._inbox if entry not in ended)
            self._num_ended += len(ended)
        return emissions

    def _checked(self, request: Request) -> Outlook:
        """Return the outlook of a request, or raise OverloadError."""
        admission, scheduler = self._scheduler.admission, self._scheduler
        rate = self._num_ended / self._busy_s if self._busy_s > 0 else 0.0
        num_waiting = self._num_queued + scheduler.num_waiting
        admission.check_queue(num_waiting, scheduler.num_running, rate, request.priority)
        outlook, now_s = scheduler.expected_hits.look(request), self._clock()
        # The inbox is read before the queues: a request that moves in between is counted twice rather than missed.
        backlog = admission.backlog(request, outlook, self._unread(), now_s)
        under_way = tuple(self._under_way)
        admission.check_time(
            request,
            outlook,
            backlog._replace(
                num_steps=len(under_way), num_prompt_tokens=sum(plan.num_prefill_tokens for plan in under_way)
            ),
            self._pace.num_tokens,
            now_s,
        )
        return outlook
