from __future__ import annotations

import pytest

from engine.request import Pooling, Request
from tests.engine.scheduling.test_own_step import teach
from tests.engine.scheduling.test_scheduler import assert_right
from tests.engine.scripted import Harness, a_config, a_request

pytestmark = pytest.mark.usefixtures("short_steps")

STEM = tuple(range(1, 13))
"""Three blocks."""


def burst(*requests: Request, prompt_token_s: float, **config: object) -> list[list[tuple[str, int]]]:
    """Return who begins in each step, and how much of each prompt was cached, if all of them come at once."""
    harness = Harness(a_config(max_num_seqs=8, max_batched_tokens=100, **config))
    teach(harness.scheduler.admission.costs, prompt_token_s=prompt_token_s)
    harness.add(*requests)
    steps = []
    while harness.scheduler.num_waiting:
        plan = harness.step()
        begun = [(row.request.request_id, row.start) for row in plan.rows if row.is_admission] if plan else []
        if begun:
            steps.append(begun)
    harness.finish()
    assert_right(harness, *requests)
    return steps


def different(count: int, **fields: object) -> list[Request]:
    return [a_request(f"r{index}", (index,) * 10, **({"max_tokens": 3} | fields)) for index in range(count)]


def test_prompts_that_cost_more_than_a_step_do_not_wait_for_each_other() -> None:
    assert burst(*different(4, max_tokens=1), prompt_token_s=0.01) == [[(f"r{index}", 0)] for index in range(4)]


def test_cheap_prompts_share_a_step() -> None:
    assert burst(*different(4), prompt_token_s=0.0001) == [[(f"r{index}", 0) for index in range(4)]]


@pytest.mark.parametrize(("max_tokens", "shares"), [(1, [2, 2, 1, 1, 1, 1]), (9, [2, 6])])
def test_the_more_prompts_wait_the_more_share_a_step_and_all_do_beside_streams(
    max_tokens: int, shares: list[int]
) -> None:
    """Each takes 15 ms; with a step's fixed cost of 2 ms, each later step delays all that wait for it."""
    steps = burst(*different(8, max_tokens=max_tokens), prompt_token_s=0.0015)
    assert [len(begun) for begun in steps] == shares


def test_a_short_prompt_does_not_have_a_step_to_itself() -> None:
    requests = [a_request(f"r{index}", (index,) * 3, max_tokens=3) for index in range(4)]
    assert [len(begun) for begun in burst(*requests, prompt_token_s=0.1)] == [2, 2]


def test_vectors_of_one_step_come_together() -> None:
    """A client mostly waits for all of them, so nothing is gained if some come earlier."""
    assert len(burst(*different(4, pooling=Pooling.LAST), prompt_token_s=0.01)) == 1


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_prefix_is_computed_once_for_all_that_come_at_once(steps_ahead: int) -> None:
    requests = [a_request(f"r{index}", (*STEM, 20 + index), max_tokens=3) for index in range(3)]
    harness = Harness(a_config(max_num_seqs=8, max_batched_tokens=100), steps_ahead=steps_ahead)
    teach(harness.scheduler.admission.costs, prompt_token_s=0.001)
    harness.add(*requests)
    harness.finish()
    begun = {
        row.request.request_id: row.start for plan in harness.runner.plans for row in plan.rows if row.is_admission
    }
    assert begun == {"r0": 0, "r1": len(STEM), "r2": len(STEM)}
    assert_right(harness, *requests)


def test_a_prefix_that_costs_less_than_a_step_is_not_waited_for() -> None:
    requests = [a_request(f"r{index}", (*STEM, 20 + index)) for index in range(3)]
    assert len(burst(*requests, prompt_token_s=0.0001)) == 1


@pytest.mark.parametrize("change", [{"enable_prefix_cache": False}, {"num_snapshots": 2}])
def test_nobody_waits_for_a_prefix_that_cannot_be_shared(change: dict[str, object]) -> None:
    requests = [a_request(f"r{index}", (*STEM, 20 + index), pooling=Pooling.LAST) for index in range(3)]
    assert len(burst(*requests, prompt_token_s=0.001, **change)) == 1


@pytest.mark.parametrize("fields", [{"pooling": Pooling.MEAN}, {"num_prompt_logprobs": 0}])
def test_nobody_waits_for_a_prefix_that_is_computed_again(fields: dict[str, object]) -> None:
    """The cache holds it, but it was waited for as long as another needed all its tokens computed."""
    harness = Harness(a_config(max_num_seqs=16, max_batched_tokens=100))
    teach(harness.scheduler.admission.costs, prompt_token_s=0.01)
    harness.add(a_request("first", STEM))
    harness.finish()
    requests = [a_request("again", (*STEM, 20), max_tokens=1, **fields), a_request("same", (*STEM, 21))]
    harness.add(*requests)
    plan = harness.step()
    assert plan is not None
    assert {row.request.request_id: row.start for row in plan.rows} == {"again": 0, "same": len(STEM)}
    harness.finish()
    assert_right(harness, *requests)


def test_others_begin_while_one_waits_for_a_prefix() -> None:
    requests = [
        a_request("first", (*STEM, 20), pooling=Pooling.LAST),
        a_request("same", (*STEM, 21), pooling=Pooling.LAST),
        a_request("salted", (*STEM, 22), salt="s", pooling=Pooling.LAST),
        a_request("other", (9,) * 12, pooling=Pooling.LAST),
    ]
    steps = burst(*requests, prompt_token_s=0.001)
    assert steps == [[("first", 0), ("salted", 0), ("other", 0)], [("same", len(STEM))]]
