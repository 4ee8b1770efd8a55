from __future__ import annotations

from engine.scheduling.step_costs import StepCosts
from tests.engine.scheduling.test_scheduler import assert_right
from tests.engine.scripted import Harness, a_config, a_request

NUM_DECODES = 8


def teach(costs: StepCosts, *, base_s: float = 0.001, row_s: float = 0.001, prompt_token_s: float = 0.0001) -> None:
    """Have steps been measured that cost so much."""
    for step in range(200):
        rows, tokens = step % (NUM_DECODES + 1), 16 * (step % 3 == 0 or step % (NUM_DECODES + 1) == 0)
        took_s = base_s + rows * row_s + tokens * prompt_token_s
        costs.observe(num_decodes=rows, num_prompt_tokens=tokens, took_s=took_s, now_s=0.0)


def flooded(**costs: float) -> Harness:
    """A flood of decodes of one tenant."""
    harness = Harness(a_config(max_num_seqs=2 * NUM_DECODES, num_blocks=200, max_batched_tokens=40))
    if costs:
        teach(harness.scheduler.admission.costs, **costs)
    harness.add(*(a_request(f"flood{index}", tenant="flood", max_tokens=12) for index in range(NUM_DECODES)))
    harness.step()
    return harness


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
        (flooded(row_s=0.001, prompt_token_s=0.001), "light", 24),
        (flooded(**dear), "light", 3),
        (flooded(), "light", 3),
    ):
        harness.add(a_request("new", range(length), tenant=tenant))
        assert len(names(harness)) == NUM_DECODES + 1
