"""The loop around the pure core, on a scripted device: nobody is forgotten, whatever fails and whoever asks when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from adapters.identity import AdapterDigest, AdapterRef
from adapters.loads import AdapterLoads
from engine.config import ResolvedConfig
from engine.engine import Engine
from engine.errors import EngineError, OverloadError, RequestError
from engine.metrics import SIZE_BOUNDS
from engine.request import Emission, FinishReason, Request, RequestId
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_own_step import teach
from tests.engine.scripted import ScriptedGate, ScriptedRunner, a_config, a_request
from tests.oracles.naive_scheduler import EOS_IDS, answer_alone

PATIENCE_S = 120


@pytest.fixture(params=[0, 1], ids=["in step", "ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with a device that computes at once, and with one that is a step behind."""
    monkeypatch.setattr(ScriptedRunner, "steps_ahead", request.param)


@dataclass
class Host:
    """An engine, what it emitted, and who waits for whom to end."""

    engine: Engine
    scheduler: Scheduler
    runner: ScriptedRunner
    gate: ScriptedGate
    emissions: dict[str, list[Emission]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    num_closed: int = 0

    def take(self, emissions: list[Emission]) -> None:
        with self.changed:
            for emission in emissions:
                self.emissions.setdefault(emission.request_id, []).append(emission)
            self.changed.notify_all()

    def start(self) -> None:
        self.thread = threading.Thread(target=self.engine.run, args=(self.take,), daemon=True)
        self.thread.start()

    def finish(self) -> None:
        self.engine.stop()
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def wait_for_end(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.reason(name) for name in names), PATIENCE_S)

    def reason(self, name: str) -> FinishReason | None:
        seen = self.emissions.get(name)
        return seen[-1].finish_reason if seen else None

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for emission in self.emissions[name] for token in emission.token_ids)

    def check_all_returned(self) -> None:
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.kv_usage == 0
        assert not +self.gate.pins


class NoAdapters:
    loads = AdapterLoads()

    def num_resident(self) -> int:
        return 0

    def learn(self, ref: AdapterRef) -> None:
        raise AssertionError("no test here has adapters of its own")

    def forget_failure(self, digest: AdapterDigest) -> None:
        pass

    def release(self, digest: AdapterDigest) -> int | None:
        return 0

    def places(self) -> dict[AdapterDigest, str]:
        return {}


def a_host(
    config: ResolvedConfig | None = None,
    *,
    gate: ScriptedGate | None = None,
    failing: frozenset[str] = frozenset(),
    arrival: threading.Event | None = None,
    pause_wish: threading.Event | None = None,
    compile_grammar: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Host:
    config, gate = config or a_config(), gate or ScriptedGate()
    scheduler, runner = Scheduler(config, gate, EOS_IDS, clock), ScriptedRunner(config, gate, failing)

    def close() -> None:
        host.num_closed += 1

    engine = Engine(
        config,
        scheduler,
        runner,
        adapters=NoAdapters(),
        close=close,
        arrival=arrival,
        pause_wish=pause_wish,
        compile_grammar=compile_grammar,
        clock=clock,
    )
    host = Host(engine, scheduler, runner, gate)
    return host


def test_requests_of_many_threads_get_the_answers_they_get_alone() -> None:
    host = a_host(a_config(max_queued_requests=100))
    requests = [a_request(str(i), range(i % 7 + 1), max_tokens=i % 9 + 1) for i in range(40)]
    host.start()
    threads = [threading.Thread(target=host.engine.add, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host.wait_for_end(*(request.request_id for request in requests))
    host.finish()
    for request in requests:
        assert host.tokens(request.request_id) == answer_alone(request, host.engine.config.max_model_len).token_ids
    host.check_all_returned()
    assert host.engine.snapshot().ended == ()
    snapshot = host.engine.snapshot(drain_ended=True)
    assert snapshot.counters.ended_by_reason == {FinishReason.LENGTH.value: 40}
    assert len(snapshot.ended) == 40
    assert host.engine.snapshot(drain_ended=True).ended == ()


def test_one_request_s_failure_is_its_own() -> None:
    host = a_host(failing=frozenset({"bad"}))
    for name in ("bad", "good"):
        host.engine.add(a_request(name))
    while not (host.reason("bad") and host.reason("good")):
        host.take(host.engine.step())
    assert host.reason("bad") is FinishReason.FAILED
    assert host.emissions["bad"][-1].error
    assert host.reason("good") is FinishReason.LENGTH
    assert host.engine.is_alive
    host.check_all_returned()


def test_a_device_that_dies_ends_every_request_and_the_engine() -> None:
    host = a_host(a_config(max_num_seqs=2))
    host.runner.dies_at_step = 3
    for name in "abcd":
        host.engine.add(a_request(name, max_tokens=30))
    host.start()
    host.wait_for_end(*"abcd")
    assert {host.reason(name) for name in "abcd"} == {FinishReason.FAILED}
    assert host.thread is not None
    host.thread.join(PATIENCE_S)
    assert host.num_closed == 1
    assert not host.engine.is_alive
    with pytest.raises(EngineError):
        host.engine.add(a_request("late"))
    host.check_all_returned()


@pytest.mark.parametrize("is_broken", [False, True])
def test_stopping_ends_what_runs_what_waits_and_what_was_only_just_added(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """And what a scheduler that has failed itself does not end."""
    host = a_host(a_config(max_num_seqs=1, max_queued_requests=2))
    for name in "ab":
        host.engine.add(a_request(name, max_tokens=50))
    host.take(host.engine.step())
    host.engine.add(a_request("c", max_tokens=50))
    if is_broken:
        monkeypatch.setattr(host.scheduler, "fail_all", lambda reason: 1 // 0)
    host.engine.stop()
    assert not host.engine.is_alive
    # Its queue is full, too, but there is nothing to come back for.
    with pytest.raises(EngineError, match="shutting down"):
        host.engine.add(a_request("late"))
    host.engine.run(host.take)
    assert {host.reason(name) for name in "abc"} == {FinishReason.FAILED}
    with pytest.raises(EngineError, match="shutting down"):
        host.engine.add(a_request("late"))
    if not is_broken:
        host.check_all_returned()


def test_a_cancelled_request_ends_before_the_next_step_and_an_unknown_one_is_ignored() -> None:
    host = a_host()
    host.engine.add(a_request("a", max_tokens=50))
    host.take(host.engine.step())
    host.engine.cancel(RequestId("nobody"))
    host.engine.cancel(RequestId("a"))
    host.take(host.engine.step())
    assert host.reason("a") is FinishReason.CANCELLED
    assert len(host.tokens("a")) <= 1
    host.check_all_returned()


def test_to_cancel_what_has_ended_does_not_end_the_next_of_its_id() -> None:
    """While a step is computed, new requests are read before cancellations."""
    host = a_host()
    host.engine.add(a_request("a", max_tokens=1))
    while host.reason("a") is None:
        host.take(host.engine.step())
    host.engine.cancel(RequestId("a"))
    with host.engine._lock:
        assert not host.engine._inbox


def a_flooded_host(clock: Callable[[], float] = lambda: 0.0) -> Host:
    """All rows but a guest's belong to one tenant, and the cost of steps is known."""
    host = a_host(a_config(max_num_seqs=4, num_guest_rows=1), clock=clock)
    teach(host.scheduler.admission.costs)
    for name in "abcd":
        host.engine.add(a_request(name, tenant="flood", max_tokens=20))
    host.take(host.engine.step())
    return host


def test_what_comes_while_a_step_is_computed_goes_before_it_but_nobody_in_it_ends() -> None:
    host = a_flooded_host()
    if host.runner.steps_ahead:
        return  # It does not pause.
    pauses = [True]

    def pause() -> bool:
        if not pauses:
            return False
        host.engine.add(a_request("light", tenant="light", max_tokens=3))
        host.engine.cancel(RequestId("a"))
        return pauses.pop()

    host.runner.pauses = pause
    brought = host.engine.step()
    # Its token leaves before the rest is computed; whoever is computed keeps the row until then.
    assert [emission.request_id for emission in brought] == ["light"]
    assert host.scheduler.num_running == 5
    host.take(brought)
    host.take(host.engine.step())
    assert host.reason("a") is None
    while host.scheduler.num_running:
        host.take(host.engine.step())
    assert host.reason("a") is FinishReason.CANCELLED
    for name, tenant, count in (("b", "flood", 20), ("light", "light", 3)):
        alone = answer_alone(a_request(name, tenant=tenant, max_tokens=count), host.engine.config.max_model_len)
        assert host.tokens(name) == alone.token_ids
    host.check_all_returned()


def test_to_cancel_what_ends_before_a_paused_step_does_not_end_the_next_of_its_id() -> None:
    """While a step is computed, cancellations stay in the inbox, and new requests overtake them."""
    host = a_flooded_host()
    if host.runner.steps_ahead:
        return  # It does not pause.
    pauses = [True]

    def pause() -> bool:
        if host.scheduler.num_running == 5:
            # It is computed, and nobody knows yet that its first token is the last one.
            host.engine.cancel(RequestId("light"))
        elif pauses:
            host.engine.add(a_request("light", tenant="light", max_tokens=1))
            return pauses.pop()
        return False

    host.runner.pauses = pause
    host.take(host.engine.step())
    assert host.reason("light") is FinishReason.LENGTH
    host.emissions.clear()
    host.engine.add(a_request("light", tenant="light", max_tokens=3))
    host.runner.pauses = lambda: bool(pauses and pauses.pop())
    pauses.append(True)
    while host.scheduler.num_running or host.scheduler.num_waiting:
        host.take(host.engine.step())
    assert host.reason("light") is FinishReason.LENGTH
    host.check_all_returned()


def test_a_step_is_asked_to_pause_for_newcomers_only_and_the_wish_ends_as_they_are_seen() -> None:
    wish = threading.Event()
    host = a_host(pause_wish=wish)
    host.engine.add(a_request("a", tenant="flood", max_tokens=20))
    assert wish.is_set()
    host.take(host.engine.step())
    assert not wish.is_set()
    host.engine.add(a_request("b", tenant="flood"))
    assert not wish.is_set()
    host.engine.add(a_request("c", tenant="light"))
    assert wish.is_set()


def test_a_full_queue_refuses_with_a_time_to_come_back_and_takes_again_when_there_is_room() -> None:
    host = a_host(a_config(max_num_seqs=1, max_queued_requests=2))
    for name in "abc":
        host.engine.add(a_request(name))
    with pytest.raises(OverloadError, match="3 requests") as refused:
        host.engine.add(a_request("d"))
    assert 1 <= refused.value.retry_after_s <= 120
    while host.reason("a") is None:
        host.take(host.engine.step())
    host.engine.add(a_request("d"))
    while host.reason("d") is None:
        host.take(host.engine.step())
    host.check_all_returned()


def test_half_of_the_queue_is_kept_for_who_is_in_no_less_of_a_hurry_than_usual() -> None:
    """The lines of a batch filled it, and for as long as that took every chat was refused."""
    host = a_host(a_config(max_num_seqs=1, max_queued_requests=4))
    for name in "abc":
        host.engine.add(a_request(name, priority=2**33))
    with pytest.raises(OverloadError, match="queue"):
        host.engine.add(a_request("d", priority=2**33))
    for name, priority in (("e", 0), ("f", -8)):
        host.engine.add(a_request(name, priority=priority))
    with pytest.raises(OverloadError, match="queue"):
        host.engine.add(a_request("g"))


def test_a_burst_counts_once_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it counted twice for that moment, and a queue was full at half its size."""
    host = a_host()
    add, waiting = host.scheduler.add, list[int]()

    def add_and_count(request: Request) -> None:
        add(request)
        waiting.append(host.engine.load().num_waiting)

    for name in "abcdef":
        host.engine.add(a_request(name))
    monkeypatch.setattr(host.scheduler, "add", add_and_count)
    host.take(host.engine.step())
    # The one that moves at the moment counts twice rather than not at all.
    assert waiting == [7] * 6


def test_an_id_that_is_alive_is_refused_and_free_again_afterwards() -> None:
    host = a_host()
    host.engine.add(a_request("a", max_tokens=1))
    with pytest.raises(RequestError, match="'a'"):
        host.engine.add(a_request("a"))
    while host.reason("a") is None:
        host.take(host.engine.step())
    host.engine.add(a_request("a"))


def test_a_request_that_waits_for_an_adapter_runs_when_it_arrives_with_nothing_else_to_wake_the_loop() -> None:
    """The arrival is told between a plan that could not use it and the sleep after that plan."""
    arrival = threading.Event()

    class LateGate(ScriptedGate):
        """An adapter that is there only once somebody has looked for it in vain."""

        def try_pin(self, digest: object) -> bool:  # type: ignore[override]
            if not arrived.is_set():
                arrived.set()
                arrival.set()
                return False
            return super().try_pin(digest)  # type: ignore[arg-type]

    arrived = threading.Event()
    host = a_host(gate=LateGate(), arrival=arrival)
    host.engine.add(a_request("a", adapter="digest"))
    assert host.engine.step() == []
    assert arrival.is_set(), "the loop would sleep although something has changed"
    host.start()
    host.wait_for_end("a")
    host.finish()
    assert host.reason("a") is FinishReason.LENGTH


def test_an_engine_that_sleeps_is_woken_by_whatever_it_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only by looking again after a while; and what it does while it is idle holds up nobody."""
    for name in ("IDLE_POLL_S", "WAITING_POLL_S"):
        monkeypatch.setattr("engine.engine." + name, 1000.0)
    now_s, rested, arrival = [0.0], threading.Event(), threading.Event()
    host = a_host(gate=ScriptedGate(load_steps={"late": 1, "never": 9}), arrival=arrival, clock=lambda: now_s[0])

    def idle() -> bool:
        now_s[0] += 100.0
        rested.set()
        return len(host.emissions) < 2

    def rest() -> None:
        rested.clear()
        assert rested.wait(PATIENCE_S)

    monkeypatch.setattr(host.runner, "idle", idle)
    stalls_s: list[float] = []
    host.runner.pauses = lambda: stalls_s.append(host.engine.load().stalled_s) or False  # type: ignore[func-returns-value]
    host.start()
    rest()
    host.engine.add(a_request("a", max_tokens=1))
    host.wait_for_end("a")
    # It has rested, not stalled.
    assert stalls_s[0] == 0.0
    host.engine.add(a_request("b", adapter="late"))
    rest()
    host.gate.tick()
    arrival.set()
    host.wait_for_end("b")
    rested.clear()
    host.engine.add(a_request("c", adapter="never"))
    assert rested.wait(PATIENCE_S)
    host.engine.cancel(RequestId("c"))
    host.wait_for_end("c")
    assert host.reason("c") is FinishReason.CANCELLED
    host.finish()


def test_a_grammar_is_compiled_before_its_request_is_queued() -> None:
    compiled: list[tuple[str, int]] = []
    host = a_host(compile_grammar=lambda grammar: compiled.append((grammar, host.engine.load().num_waiting)))
    host.engine.add(a_request("a"))
    host.engine.add(a_request("b", grammar="g"))
    assert compiled == [("g", 1)]


def test_the_traces_of_requests_that_it_knows_are_told() -> None:
    host = a_host()
    host.engine.add(a_request("a"))
    while host.reason("a") is None:
        host.take(host.engine.step())
    assert host.engine.traces([RequestId("a"), RequestId("nobody")]).keys() == {"a"}


def test_a_deadline_ends_a_request_that_waits() -> None:
    now_s = [0.0]
    host = a_host(a_config(max_num_seqs=1), clock=lambda: now_s[0])
    host.engine.add(a_request("first", max_tokens=50))
    host.take(host.engine.step())
    host.engine.add(a_request("late", deadline_s=1.0))
    now_s[0] = 2.0
    host.take(host.engine.step())
    assert host.reason("late") is not None
    assert host.tokens("late") == ()


def test_steps_go_on_while_it_is_foretold_whether_a_request_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    host = a_host()
    host.engine.add(a_request("first"))
    backlog = host.scheduler.admission.backlog

    def slow(*args: object) -> object:
        stepping = threading.Thread(target=lambda: host.take(host.engine.step() + host.engine.step()), daemon=True)
        stepping.start()
        stepping.join(PATIENCE_S)
        assert not stepping.is_alive(), "a step waits for a forecast"
        return backlog(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(host.scheduler.admission, "backlog", slow)
    host.engine.add(a_request("second"))
    assert host.tokens("first")
    assert host.engine.snapshot().num_waiting == 1


def test_the_snapshot_tells_what_runs_and_what_waits() -> None:
    host = a_host(a_config(max_num_seqs=1))
    for name in "abc":
        host.engine.add(a_request(name, max_tokens=9))
    assert (host.engine.snapshot().num_running, host.engine.snapshot().num_waiting) == (0, 3)
    host.take(host.engine.step())
    snapshot = host.engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 2)
    num_steps = 1 - host.runner.steps_ahead
    assert snapshot.num_steps == snapshot.step_requests.total == num_steps
    assert snapshot.kv_usage > 0
    assert snapshot.counters.generation_tokens == num_steps


def test_steps_are_counted_by_their_requests_and_their_tokens() -> None:
    host = a_host(a_config(max_num_seqs=4))
    for name in "abc":
        host.engine.add(a_request(name, (1, 2, 3), max_tokens=4))
    while host.engine.snapshot().num_running + host.engine.snapshot().num_waiting:
        host.take(host.engine.step())
    snapshot = host.engine.snapshot()
    # Three prompts in one step, then three steps of a token of each.
    assert (snapshot.step_requests.total, snapshot.step_tokens.total) == (12, 18)
    up_to_four, up_to_sixteen = SIZE_BOUNDS.index(4), SIZE_BOUNDS.index(16)
    assert snapshot.step_requests.counts[up_to_four] == 4
    assert (snapshot.step_tokens.counts[up_to_four], snapshot.step_tokens.counts[up_to_sixteen]) == (3, 1)


LONG = tuple(i % 23 + 1 for i in range(399))


def test_a_long_prompt_is_cut_to_what_streams_can_wait_for() -> None:
    """On a clock by which every reading takes a tenth of a second, a step is always far over the target."""
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.1
        return now_s[0]

    config = a_config(max_batched_tokens=200, max_model_len=2000, num_blocks=600)
    host = a_host(replace(config, max_decode_gap_s=0.01), clock=clock)
    host.engine.add(a_request("stream", max_tokens=60))
    host.take(host.engine.step())
    host.engine.add(a_request("long", LONG))
    while host.reason("long") is None:
        host.take(host.engine.step())
    chunks = [row.num_tokens for plan in host.runner.plans for row in plan.rows if row.request.request_id == "long"]
    # What is planned before the first chunk is done cannot know how long that takes.
    first = 1 + host.runner.steps_ahead
    assert chunks[:first] == [128] * first
    assert max(chunks[first:]) <= 16
    assert host.tokens("long") == answer_alone(a_request("long", LONG), 2000).token_ids


def test_its_load_is_what_a_newcomer_would_find() -> None:
    now_s = [0.0]
    host = a_host(a_config(max_num_seqs=2, max_batched_tokens=16), clock=lambda: now_s[0])
    long, short = [i % 20 for i in range(40)], range(10)
    prompts = {"a": long, "b": long, "c": short}
    for name, prompt in prompts.items():
        host.engine.add(a_request(name, prompt, max_tokens=2))
    now_s[0] = 2.0
    load = host.engine.load()
    # The second prompt is the first, and the third its beginning: blocks are of 4 tokens, the last is always computed.
    assert (load.queued_tokens, load.num_running, load.num_waiting, load.max_running) == (40 + 4 + 2, 0, 3, 2)
    assert load.stalled_s == 2.0
    host.take(host.engine.step())
    now_s[0] = 5.0
    load = host.engine.load()
    assert load.num_running + load.num_waiting == 3
    assert (load.queued_tokens, load.stalled_s) == (46 - 16, 5.0 - 2.0 * (not host.runner.steps_ahead))
    while host.engine.load().num_ended < 3:
        host.take(host.engine.step())
    now_s[0] = 9.0
    load = host.engine.load()
    assert (load.queued_tokens, load.num_running, load.num_waiting, load.stalled_s) == (0, 0, 0, 0.0)
    assert (load.block_tokens, load.landmark_blocks) == (host.engine.config.block_tokens, 1)
    # Two of the three prompts are one, and share their blocks' names.
    assert len(load.landmarks) >= 40 // load.block_tokens
    # All but the last block is in the cache.
    host.engine.add(a_request("d", long))
    host.engine.cancel(RequestId("d"))
    assert host.engine.load().queued_tokens == 4


def test_an_engine_without_a_prefix_cache_tells_of_no_landmarks() -> None:
    assert a_host(a_config(enable_prefix_cache=False)).engine.load().landmark_blocks == 0
