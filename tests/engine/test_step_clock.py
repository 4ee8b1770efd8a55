"""When steps began and how long they took, whichever waited for another."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from engine.step import StepPlan
from engine.step_clock import StepClock
from tests.engine.scripted import Harness, a_request


def test_a_step_that_another_went_before_took_what_is_left() -> None:
    clock = StepClock()
    row: Any = SimpleNamespace(is_admission=False, num_tokens=1)
    outer, own, after = (StepPlan(step_id=step_id, rows=(row,)) for step_id in (1, 2, 3))
    clock.begin(1, 0.0)
    clock.begin(2, 4.0)
    clock.end(own, 6.0)
    assert clock.token_s == 2.0
    clock.end(outer, 10.0)
    assert clock.token_s == 2.0 + 8.0
    clock.begin(3, 10.0)
    clock.end(after, 11.0)
    assert clock.token_s == 11.0


def test_a_step_of_newcomers_alone_is_no_time_of_those_who_decode() -> None:
    """Streams were charged for the prompts of others; the time of such a step is that of few tokens."""
    harness = Harness()
    harness.add(a_request("decodes", max_tokens=9))
    first = harness.step()
    harness.add(a_request("comes", (1, 2, 3)))
    mixed = harness.step()
    newcomers = replace(mixed, rows=tuple(row for row in mixed.rows if row.is_admission))
    assert [len(plan.rows) for plan in (first, mixed, newcomers)] == [1, 2, 1]
    clock = StepClock()
    for step_id, (plan, told) in enumerate([(first, 0.0), (newcomers, 0.0), (mixed, 1.5)]):
        clock.begin(step_id, 6.0 * step_id)
        clock.end(replace(plan, step_id=step_id), 6.0 * (step_id + 1))
        assert (clock.per_token_s > 0, clock.token_s) == (True, told)


def test_a_step_s_whole_time_begins_with_the_end_of_the_one_before_unless_there_was_none() -> None:
    clock = StepClock()
    outer, own, after = (StepPlan(step_id=step_id, rows=()) for step_id in (1, 2, 3))
    for plan in (outer, own, after):
        plan.__dict__["num_tokens"] = 1
    clock.rest(100.0)
    clock.begin(1, 101.0)
    clock.begin(2, 104.0)
    clock.end(own, 106.0)
    assert (clock.step_s, clock.whole_s) == (2.0, 2.0)
    clock.end(outer, 110.0)
    assert (clock.step_s, clock.whole_s) == (7.0, 8.0)
    clock.begin(3, 110.5)
    clock.end(after, 112.0)
    assert (clock.step_s, clock.whole_s) == (1.5, 2.0)
