"""What the engine measures, on a clock that only the device and the scheduler move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import OverloadError
from engine.metrics import StepTimes
from tests.engine.scripted import a_config, a_request
from tests.engine.test_engine import Host, a_flooded_host, a_host


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def before(self, spent_s: float, call: Callable[..., object]) -> Callable[..., object]:
        """Return a call that takes so long."""

        def timed(*args: object) -> object:
            self.now_s += spent_s
            return call(*args)

        return timed


def note_costs(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """Return a list that gets the decodes, the prompt tokens and the time of each step."""
    costs: list[tuple[int, int, float]] = []

    def observe(*, num_decodes: int, num_prompt_tokens: int, took_s: float, **_: float) -> None:
        costs.append((num_decodes, num_prompt_tokens, took_s))

    monkeypatch.setattr(host.scheduler.admission.costs, "observe", observe)
    return costs


def run_one_by_one(host: Host, clock: Clock, names: str) -> None:
    """Steps take a second, and the host a quarter between two; between two requests nothing runs for long."""
    host.runner.pauses = clock.before(1.0, lambda: False)  # type: ignore[assignment]
    for name in names:
        clock.now_s += 100.0
        host.engine.add(a_request(name, max_tokens=3))
        while host.reason(name) is None:
            host.take(host.engine.step())
            clock.now_s += 0.25


def test_a_step_costs_its_time_and_the_host_s_between_two_but_not_what_passed_without_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    host = a_host(clock=clock)
    costs = note_costs(host, monkeypatch)
    run_one_by_one(host, clock, "ab")
    assert costs == [(0, 3, 1.0), (1, 0, 1.25), (1, 0, 1.25)] * 2
    assert host.engine.load().step_s == 1.0


def test_a_step_that_waits_behind_another_on_the_device_took_what_came_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    host = a_host(clock=clock)
    host.runner.steps_ahead = 1
    monkeypatch.setattr(host.runner, "collect", clock.before(3.0, host.runner.collect))
    host.engine.add(a_request("a", max_tokens=5))
    for _ in range(3):
        host.take(host.engine.step())
    assert (clock.now_s, host.engine.load().step_s) == (6.0, 3.0)


def test_who_meets_a_full_queue_is_told_when_half_of_it_is_gone_at_the_rate_while_there_was_work() -> None:
    clock = Clock()
    host = a_host(a_config(max_num_seqs=1, max_queued_requests=2), clock=clock)
    run_one_by_one(host, clock, "ab")
    for name in "cde":
        host.engine.add(a_request(name))
    host.take(host.engine.step())
    with pytest.raises(OverloadError) as refused:
        host.engine.add(a_request("f"))
    # One of two that wait, where two have ended in seven seconds.
    assert refused.value.retry_after_s == 3.5


def test_the_time_of_newcomers_does_not_count_to_the_step_that_paused_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    host = a_flooded_host(clock)
    costs = note_costs(host, monkeypatch)
    # A step before; then one that pauses after three seconds for a newcomer's four, and goes on for three.
    times_s = iter([1.0, 3.0, 4.0, 3.0])

    def pause() -> bool:
        spent_s = next(times_s)
        clock.now_s += spent_s
        if clock.now_s != 4.0:
            return False
        host.engine.add(a_request("light", tenant="light", max_tokens=3))
        return True

    host.runner.pauses = pause
    for _ in range(3):
        host.take(host.engine.step())
    assert costs == [(4, 0, 1.0), (0, 3, 4.0), (4, 0, 6.0)]


def test_the_snapshot_tells_where_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    host = a_host(clock=clock)
    monkeypatch.setattr(host.scheduler, "plan", clock.before(2.0, host.scheduler.plan))
    monkeypatch.setattr(host.runner, "collect", clock.before(3.0, host.runner.collect))
    monkeypatch.setattr(host.scheduler, "commit", clock.before(5.0, host.scheduler.commit))
    host.runner.times = StepTimes(prepare_s=0.1, forward_s=0.2, sample_s=0.3)
    host.engine.add(a_request("a", max_tokens=2))
    while host.reason("a") is None:
        host.take(host.engine.step())
    snapshot = host.engine.snapshot()
    assert snapshot.step_times == StepTimes(
        schedule_s=4.0, wait_s=6.0, emit_s=10.0, prepare_s=0.1, forward_s=0.2, sample_s=0.3
    )
    assert snapshot.last_progress_s == clock.now_s
