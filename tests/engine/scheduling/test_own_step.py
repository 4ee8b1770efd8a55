from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request import Request
from engine.scheduling.own_step import MAX_AT_ONCE, MAX_PARTS, MAX_PRICE, OwnSteps
from engine.scheduling.step_costs import StepCosts
from tests.engine.scheduling.test_row_shares import live
from tests.engine.scheduling.test_scheduler import assert_right
from tests.engine.scripted import Harness, a_config, a_request

NUM_DECODES = 8
CAP = 16
"""Prompt tokens of a step that decodes, and of an own step."""


def teach(costs: StepCosts, *, base_s: float = 0.001, row_s: float = 0.001, prompt_token_s: float = 0.0001) -> None:
    """Have steps been measured that cost so much."""
    for step in range(200):
        rows, tokens = step % (NUM_DECODES + 1), 16 * (step % 3 == 0 or step % (NUM_DECODES + 1) == 0)
        took_s = base_s + rows * row_s + tokens * prompt_token_s
        costs.observe(num_decodes=rows, num_prompt_tokens=tokens, took_s=took_s, now_s=0.0)


def flooded(cap: int | None = None, **costs: float) -> Harness:
    """A flood of decodes of one tenant."""
    config = a_config(max_num_seqs=2 * NUM_DECODES, num_blocks=200, max_batched_tokens=40)
    harness = Harness(replace(config, max_prefill_tokens_with_decodes=cap))
    if costs:
        teach(harness.scheduler.admission.costs, **costs)
    harness.add(*(a_request(f"flood{index}", tenant="flood", max_tokens=12) for index in range(NUM_DECODES)))
    harness.step()
    return harness


def full(num_guest_rows: int = 1, cap: int | None = None, **costs: float) -> Harness:
    """A flood that has all rows, and some of which waits."""
    config = a_config(max_num_seqs=NUM_DECODES, num_guest_rows=num_guest_rows, num_blocks=200, max_batched_tokens=40)
    harness = Harness(replace(config, max_prefill_tokens_with_decodes=cap))
    teach(harness.scheduler.admission.costs, **costs)
    harness.add(*(a_request(f"flood{index}", tenant="flood", max_tokens=12) for index in range(2 * NUM_DECODES)))
    harness.step()
    harness.step()
    return harness


def step_with(harness: Harness, *late: Request) -> list[list[str]]:
    """Let one request after the other come while a step is computed; returns who was computed, as it began."""
    latecomers = [*reversed(late)]

    def pauses() -> bool:
        if not latecomers:
            return False
        harness.add(latecomers.pop())
        return True

    harness.runner.pauses = pauses
    count = len(harness.runner.plans)
    harness.step()
    return [[row.request.request_id for row in plan.rows] for plan in harness.runner.plans[count:]]


def parts(harness: Harness, name: str, num_steps: int) -> list[int]:
    """How many tokens of a request each step computes, negative in an own step."""
    found = []
    for _ in range(num_steps):
        plan = harness.step()
        assert plan is not None
        tokens = sum(row.num_tokens for row in plan.rows if row.request.request_id == name)
        found.append(-tokens if len(plan.rows) == 1 else tokens)
    return found


def names(harness: Harness) -> list[str]:
    plan = harness.step()
    assert plan is not None
    return [row.request.request_id for row in plan.rows]


def test_a_short_prompt_of_who_has_nothing_running_is_computed_without_the_decodes_of_others() -> None:
    for prompt in ((1, 2, 3), (1,)):
        harness = flooded(row_s=0.001)
        harness.add(light := a_request("light", prompt, tenant="light", max_tokens=5))
        assert names(harness) == ["light"]
        assert harness.tokens("light")
        assert len(names(harness)) == NUM_DECODES + 1
        harness.finish()
        assert_right(harness, light)


@pytest.mark.parametrize("lengths", [(38, 1, 1), (39, 1), (39, 1, 1), (38, 1, 2), (1,) * 8])
def test_prompts_of_one_token_take_their_share_of_its_budget(lengths: tuple[int, ...]) -> None:
    """They were counted as decodes, of which it has none, until it was overdrawn: that ended the engine."""
    harness = flooded(row_s=0.001)
    requests = [a_request(f"new{i}", [1 + i] * length, tenant=f"t{i}") for i, length in enumerate(lengths)]
    harness.add(*requests)
    plan = harness.step()
    assert plan is not None
    whole = {request.request_id: len(request.prompt_ids) for request in requests}
    assert all(row.num_tokens == whole[row.request.request_id] for row in plan.rows)
    assert 0 < plan.num_tokens <= 40
    harness.finish()


def test_a_begun_prompt_does_not_end_in_an_own_step_if_the_budget_has_no_token_for_its_decode() -> None:
    """It had a row before the decodes had all of the budget; as one more than fit, it ended the engine."""
    config = a_config(max_num_seqs=3, max_batched_tokens=2, num_blocks=200, max_prefill_tokens_with_decodes=1)
    harness = Harness(config)
    teach(harness.scheduler.admission.costs)
    harness.add(first := a_request("first", (1,), tenant="first", max_tokens=9))
    harness.step()
    harness.add(long := a_request("long", (1, 2, 3), tenant="long"))
    assert names(harness) == ["long"], "its first part"
    harness.add(second := a_request("second", (1,), tenant="second", max_tokens=9))
    harness.step()
    harness.finish()
    assert_right(harness, first, long, second)


def test_there_are_never_two_such_steps_in_a_row() -> None:
    harness = flooded(row_s=0.001)
    harness.add(a_request("first", tenant="first"))
    assert names(harness) == ["first"]
    harness.add(a_request("second", tenant="second"))
    assert len(names(harness)) > NUM_DECODES
    harness.add(a_request("third", tenant="third"))
    assert names(harness) == ["third"]


def test_it_is_computed_beside_them_where_its_flow_decodes_or_a_step_of_its_own_would_not_pay() -> None:
    dear = {"base_s": 0.02, "row_s": 0.001}
    for harness, tenant, length in (
        (flooded(row_s=0.001), "flood", 3),
        (flooded(**dear), "light", 3),
        (flooded(), "light", 3),
    ):
        harness.add(a_request("new", range(length), tenant=tenant))
        assert len(names(harness)) == NUM_DECODES + 1


def test_a_prompt_too_long_for_one_is_cut_into_some_that_take_turns_with_steps_of_the_others() -> None:
    harness = full(cap=CAP)
    long = a_request("long", [1 + i % 9 for i in range(MAX_PARTS * CAP - 1)], tenant="long")
    assert step_with(harness, long)[1:] == [["long"]]
    assert parts(harness, "long", 4) == [-CAP, CAP - 1, 1, 1]
    harness.finish()
    assert_right(harness, long)


def test_what_was_begun_beside_others_is_completed_alone() -> None:
    harness = flooded(row_s=0.001, cap=CAP)
    harness.add(long := a_request("long", [1 + i % 9 for i in range(MAX_PARTS * CAP - 1)], tenant="long"))
    assert parts(harness, "long", 4) == [-CAP, CAP, -(CAP - 1), 1]
    harness.finish()
    assert_right(harness, long)


def test_an_own_step_takes_as_long_as_streams_may_wait() -> None:
    costs = StepCosts()
    assert OwnSteps(costs, 0.2).cap(16) == 16
    teach(costs)
    assert OwnSteps(costs, None).cap(16) == 16
    assert OwnSteps(costs, 0.001).cap(16) == 16
    assert costs.prompt_s(num_tokens := OwnSteps(costs, 0.2).cap(16) or 0) == pytest.approx(0.2, rel=0.02)
    assert num_tokens > 1000


def test_a_step_that_was_paused_counts_with_what_is_left_of_it() -> None:
    costs = {"base_s": 0.012, "row_s": 0.001}
    assert len(step_with(full(**costs), a_request("light", tenant="light"))) == 2
    harness = flooded(**costs)
    harness.add(a_request("light", tenant="light"))
    assert len(names(harness)) == NUM_DECODES + 1


def test_it_goes_before_the_step_under_way_as_a_guest_where_every_row_is_taken() -> None:
    harness = full()
    outer, own = step_with(harness, light := a_request("light", tenant="light", max_tokens=30))
    assert (len(outer), own) == (NUM_DECODES, ["light"])
    # It has its token, and nobody has lost a row.
    assert len(harness.tokens("light")) == 1
    assert harness.scheduler.counters.num_preemptions == 0
    assert len(names(harness)) == NUM_DECODES + 1
    assert harness.scheduler.num_running == NUM_DECODES + 1
    harness.finish()
    assert_right(harness, light)


def test_a_guest_gives_nobody_else_a_row() -> None:
    harness = full(num_guest_rows=2)
    step_with(harness, a_request("light", tenant="light", max_tokens=30))
    while harness.reason("flood0") is None:
        harness.step()
        assert harness.scheduler.num_running <= NUM_DECODES + 1
    harness.step()
    # Of the flood as many as ever.
    assert harness.scheduler.num_running == NUM_DECODES + 1


def test_nobody_goes_before_the_step_under_way_who_is_no_newcomer_too_long_or_not_next() -> None:
    harness = full(cap=CAP)
    for late in (
        [a_request("flood again", tenant="flood")],
        [a_request("long", [1] * (MAX_PARTS * CAP + 1), tenant="long")],
        [a_request("first", tenant="flood", priority=-1), a_request("second", tenant="second")],
        [a_request("scored", tenant="scored", num_prompt_logprobs=0)],
    ):
        assert len(step_with(harness, *late)) == 1
        for request in late:
            harness.cancel(request.request_id)
        harness.step()


def test_it_goes_before_one_step_once_and_not_before_the_next() -> None:
    harness = full(num_guest_rows=2)
    assert len(step_with(harness, a_request("first", tenant="first"))) == 2
    assert len(step_with(harness, a_request("second", tenant="second"))) == 2
    harness = full(num_guest_rows=2)
    assert len(step_with(harness, *(a_request(name, tenant=name) for name in "abc"))) == 2
    # Whoever was too late for it is computed after the others' step, and then beside them.
    assert names(harness) == ["b", "c"]
    assert len(names(harness)) > NUM_DECODES


def test_a_long_time_without_any_is_no_credit_for_more_than_a_burst() -> None:
    costs = StepCosts()
    teach(costs)
    own_steps, num_own = OwnSteps(costs), 0
    for _ in range(5000):
        own_steps.note(NUM_DECODES, 0, is_own=False)
    while own_steps.pays([live("a", "a", 0)], [live("b", "b", 1)]) and num_own < 100:
        own_steps.note(0, 3, is_own=True)
        own_steps.note(NUM_DECODES, 0, is_own=False)
        num_own += 1
    # The others pay for some meanwhile.
    assert MAX_AT_ONCE <= num_own <= 1.5 * MAX_AT_ONCE


def test_where_every_request_is_a_newcomer_they_cost_the_others_a_bounded_part_of_their_time() -> None:
    costs = StepCosts()
    teach(costs)
    own_steps, base_s = OwnSteps(costs), costs.base_s
    running, waiting = [live("a", "a", 0)], [live("b", "b", 1)]
    own_steps.note(NUM_DECODES, 0, is_own=False)
    own_s = others_s = 0.0
    for _ in range(2000):
        if own_steps.pays(running, waiting):
            own_steps.note(0, 3, is_own=True)
            own_s += base_s or 0.0
        else:
            own_steps.note(NUM_DECODES, 0, is_own=False)
            others_s += costs.step_s(NUM_DECODES)
    assert MAX_PRICE / 2 < own_s / others_s < MAX_PRICE + 0.01
