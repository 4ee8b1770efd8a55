"""The door of an engine in simulated time: who is let in is served by the deadline, who is refused knows when."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import OverloadError
from engine.request import FinishReason, Request
from engine.scheduling.admission import MAX_RETRY_AFTER_S
from engine.scheduling.hopeless import DEADLINE_LOST
from tests.engine.scripted import Harness, a_config, a_request
from tests.engine.simulated import ExactCosts, SimulatedEngine

MACHINE = ExactCosts(base_s=0.01, row_s=0.002, token_s=0.0005)
ROOMY = a_config(max_model_len=400, num_blocks=2000, max_queued_requests=1000, enable_prefix_cache=False)


class Arrival(NamedTuple):
    """A request, and the steps that are made before the next one comes."""

    num_prompt: int
    max_tokens: int
    patience_s: float | None
    steps: int


STEPS = st.sampled_from([0, 0, 1, 3, 10])
ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(1, 60), st.integers(1, 30), st.none() | st.floats(0.01, 3), STEPS)
    # A document; and a short question with a long answer, which passes it.
    | st.builds(Arrival, st.integers(150, 300), st.integers(1, 60), st.none(), STEPS)
    | st.builds(Arrival, st.integers(1, 12), st.integers(50, 150), st.none() | st.floats(0.5, 6), STEPS),
    min_size=1,
    max_size=14,
)


def prompt_of(num_tokens: int) -> tuple[int, ...]:
    return tuple(1 + i % 20 for i in range(num_tokens))


def arrived(simulated: SimulatedEngine, name: str, arrival: Arrival) -> Request:
    return a_request(
        name,
        prompt_of(arrival.num_prompt),
        max_tokens=arrival.max_tokens,
        deadline_s=None if arrival.patience_s is None else simulated.now_s + arrival.patience_s,
    )


def refusal(simulated: SimulatedEngine, request: Request) -> OverloadError | None:
    try:
        simulated.engine.add(request)
    except OverloadError as error:
        return error
    return None


def test_after_a_pause_the_first_of_a_burst_measures_and_the_others_are_judged_by_what_was_known() -> None:
    costs = ExactCosts(base_s=0.01, row_s=0.002, token_s=0.5, is_known=False)
    simulated = SimulatedEngine(replace(ROOMY, max_num_seqs=4, max_queue_s=20.0), costs)
    refused = [refusal(simulated, a_request(f"r{i}", prompt_of(30), max_tokens=4)) for i in range(5)]
    assert refused[:2] == [None, None], "the first, however slow, and the second within its time"
    assert [error and error.reason for error in refused[2:]] == ["queue_time"] * 3


@given(
    arrivals=ARRIVALS,
    num_rows=st.integers(1, 5),
    budget=st.integers(1, 40),
    cap=st.none() | st.integers(1, 20),
    ahead=st.integers(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_who_is_let_in_is_served_by_its_deadline_whoever_comes_later(
    arrivals: list[Arrival], num_rows: int, budget: int, cap: int | None, ahead: int
) -> None:
    config = replace(
        ROOMY, max_num_seqs=num_rows, max_batched_tokens=budget, max_prefill_tokens_with_decodes=cap, vocab_size=None
    )
    simulated = SimulatedEngine(config, MACHINE, steps_ahead=ahead)
    let_in = []
    for i, arrival in enumerate(arrivals):
        request = arrived(simulated, f"r{i}", arrival)
        refused = refusal(simulated, request)
        if refused is None:
            let_in.append(request)
        else:
            assert refused.reason == "deadline"
            assert 1 <= refused.retry_after_s <= MAX_RETRY_AFTER_S
        for _ in range(arrival.steps):
            simulated.step()
    simulated.finish([request.request_id for request in let_in])
    for request in let_in:
        assert simulated.reason_by_id[request.request_id] is FinishReason.LENGTH
        if request.deadline_s is not None:
            assert simulated.ended_at_by_id[request.request_id] <= request.deadline_s + 1e-9


def test_a_row_that_was_promised_goes_to_no_later_prompt_that_passes_a_long_one() -> None:
    """It was taken for hundreds of tokens, and the deadline was over before any row was free again."""
    simulated = SimulatedEngine(replace(ROOMY, max_num_seqs=2, max_batched_tokens=10, max_model_len=700), MACHINE)
    simulated.engine.add(a_request("long", prompt_of(300), max_tokens=30))
    simulated.step()
    simulated.engine.add(a_request("promised", prompt_of(40), max_tokens=2, deadline_s=simulated.now_s + 0.95))
    simulated.engine.add(a_request("passes", prompt_of(4), max_tokens=300))
    simulated.finish(["long", "promised", "passes"])
    assert simulated.reason_by_id["promised"] is FinishReason.LENGTH


def test_who_hurries_takes_no_place_of_another_that_has_a_deadline() -> None:
    """The second was served at its turn, a third of a second before it had to be, and the first never."""
    simulated = SimulatedEngine(replace(ROOMY, max_num_seqs=2, max_batched_tokens=32), MACHINE, steps_ahead=1)
    simulated.engine.add(a_request("long", prompt_of(228), max_tokens=6))
    simulated.step()
    simulated.engine.add(a_request("answers", prompt_of(9), max_tokens=169))
    simulated.engine.add(a_request("first", prompt_of(76), max_tokens=19, deadline_s=1.2))
    simulated.step()
    simulated.engine.add(a_request("second", prompt_of(10), max_tokens=81, deadline_s=simulated.now_s + 1.8))
    simulated.finish(["first", "second"])
    assert [simulated.reason_by_id[name] for name in ("first", "second")] == [FinishReason.LENGTH] * 2


@given(num_prompt=st.integers(1, 60), max_tokens=st.integers(1, 60), share=st.floats(0.2, 3))
@example(num_prompt=1, max_tokens=1, share=1.03125)
@example(num_prompt=2, max_tokens=1, share=1.19)
@settings(deadline=None, max_examples=30)
def test_an_idle_engine_takes_what_fits_and_nothing_else(num_prompt: int, max_tokens: int, share: float) -> None:
    alone = SimulatedEngine(ROOMY, MACHINE)
    alone.engine.add(
        a_request("a", range(num_prompt % 24), max_tokens=max_tokens) if num_prompt % 24 else a_request("a")
    )
    alone.finish(["a"])
    took_s = alone.now_s
    simulated = SimulatedEngine(ROOMY, MACHINE)
    request = replace(alone.runner.plans[0].rows[0].request, deadline_s=share * took_s)
    # The step of a prompt is taken to cost a row more, which decodes only from then on.
    if share * took_s >= took_s + MACHINE.step_s(1) - MACHINE.step_s(0) + 1e-9:
        simulated.engine.add(request)
        simulated.finish(["a"])
        assert simulated.reason_by_id["a"] is FinishReason.LENGTH
    elif share < 1 - 1e-9:
        with pytest.raises(OverloadError, match="even without other requests"):
            simulated.engine.add(request)


def filled(num_waiting: int, **changes: object) -> SimulatedEngine:
    """One row, and so many who wait for it, each for about a second."""
    simulated = SimulatedEngine(replace(ROOMY, max_num_seqs=1, **changes), MACHINE)  # type: ignore[arg-type]
    for i in range(num_waiting + 1):
        simulated.engine.add(a_request(f"w{i}", max_tokens=80))
    simulated.step()
    return simulated


def test_who_is_refused_for_its_deadline_fits_when_it_comes_back() -> None:
    simulated = filled(4)
    with pytest.raises(OverloadError) as refused:
        simulated.engine.add(a_request("late", max_tokens=80, deadline_s=simulated.now_s + 3.0))
    back_at_s = simulated.now_s + refused.value.retry_after_s
    assert refused.value.retry_after_s > 1
    assert not refused.value.is_final
    assert "without other requests" not in str(refused.value)
    while simulated.now_s < back_at_s:
        simulated.step()
    simulated.engine.add(a_request("late", max_tokens=80, deadline_s=simulated.now_s + 3.0))


@pytest.mark.parametrize("cap", [None, 5])
def test_the_time_of_a_long_prompt_beside_an_answer_is_foretold_at_most_two_fifths_late(cap: int | None) -> None:
    def begun() -> SimulatedEngine:
        simulated = SimulatedEngine(replace(ROOMY, max_prefill_tokens_with_decodes=cap), MACHINE)
        simulated.engine.add(a_request("answers", max_tokens=300))
        simulated.step()
        return simulated

    beside = begun()
    began_s = beside.now_s
    beside.engine.add(a_request("long", prompt_of(200)))
    beside.finish(["long"])
    took_s = beside.ended_at_by_id["long"] - began_s
    begun().engine.add(a_request("long", prompt_of(200), deadline_s=began_s + 1.4 * took_s))
    with pytest.raises(OverloadError):
        begun().engine.add(a_request("long", prompt_of(200), deadline_s=began_s + 0.95 * took_s))


def test_who_is_refused_for_a_deadline_that_nobody_could_keep_need_not_come_back() -> None:
    simulated = SimulatedEngine(ROOMY, MACHINE)
    simulated.engine.add(a_request("a", max_tokens=20))
    simulated.finish(["a"])
    with pytest.raises(OverloadError) as refused:
        simulated.engine.add(a_request("b", max_tokens=80, deadline_s=simulated.now_s + 0.01))
    assert refused.value.is_final


def test_the_wait_for_a_turn_is_bounded_and_who_is_refused_knows_when_it_is_short_enough() -> None:
    simulated = filled(2, max_queue_s=3.0)
    simulated.engine.add(a_request("last", max_tokens=80))
    with pytest.raises(OverloadError, match="longer than 3 s") as refused:
        simulated.engine.add(a_request("more"))
    assert refused.value.reason == "queue_time"
    back_at_s = simulated.now_s + refused.value.retry_after_s
    while simulated.now_s < back_at_s:
        simulated.step()
    simulated.engine.add(a_request("more"))
    assert simulated.scheduler.admission.refused_by_reason == {"queue_time": 1}


def test_a_prompt_is_taken_to_share_its_steps_with_those_who_are_there_not_with_every_row() -> None:
    """With as many rows as tokens a step, it was foretold to advance by one token in each."""
    simulated = SimulatedEngine(replace(ROOMY, max_num_seqs=16, max_batched_tokens=16, max_queue_s=0.5), MACHINE)
    simulated.engine.add(a_request("document", prompt_of(200)))
    simulated.step()
    simulated.engine.add(a_request("medium", prompt_of(60)))


def test_a_request_is_judged_by_what_is_before_it_only() -> None:
    simulated = filled(2, max_queue_s=3.0)
    simulated.engine.add(a_request("last", max_tokens=80))
    with pytest.raises(OverloadError):
        simulated.engine.add(a_request("low"))
    simulated.engine.add(a_request("urgent", priority=-10))
    simulated.engine.add(a_request("another flow", tenant="other"))


def test_who_has_begun_elsewhere_is_let_in() -> None:
    simulated = filled(8)
    simulated.engine.add(a_request("resumed", max_tokens=80, prior_output_ids=(3,), deadline_s=simulated.now_s + 0.5))


def test_before_anything_is_measured_everybody_is_let_in_and_what_was_measured_long_ago_is_forgotten() -> None:
    simulated = SimulatedEngine(ROOMY, MACHINE, learns=True)
    simulated.engine.add(a_request("a", max_tokens=60, deadline_s=0.8))
    while "a" not in simulated.reason_by_id:
        simulated.step()
    with pytest.raises(OverloadError):
        simulated.engine.add(a_request("b", max_tokens=60, deadline_s=simulated.now_s + 0.4))
    simulated.engine.add(a_request("c", max_tokens=60, deadline_s=simulated.now_s + 0.8))
    simulated.finish(["c"])
    assert simulated.reason_by_id["c"] is FinishReason.LENGTH
    simulated.runner.now_s += 1000
    simulated.engine.add(a_request("b", max_tokens=60, deadline_s=simulated.now_s + 0.4))


def test_an_answer_that_may_fill_the_context_is_taken_to_be_as_long_as_others_were() -> None:
    simulated = SimulatedEngine(ROOMY, MACHINE)
    simulated.engine.add(a_request("open", max_tokens=399, ignore_eos=False, deadline_s=2.0))
    with pytest.raises(OverloadError):
        simulated.engine.add(a_request("bounded", max_tokens=300, ignore_eos=False, deadline_s=2.0))


def test_a_promise_that_is_at_risk_is_kept_before_those_who_were_promised_nothing() -> None:
    """The machine has become slower since; three who came before have no deadline."""
    now_s = [0.0]
    harness = Harness(a_config(max_num_seqs=1), clock=lambda: now_s[0])
    harness.scheduler.admission.costs = MACHINE
    patient = [a_request(f"patient{i}", max_tokens=20) for i in range(3)]
    late = a_request("late", max_tokens=10, deadline_s=3.0)
    harness.add(*patient, late)
    needed_s = 10 * MACHINE.step_s(2) + MACHINE.prompt_s(3)
    order: list[str] = []
    while len(order) < 4:
        plan = harness.step()
        order += [row.request.request_id for row in plan.rows if row.is_admission] if plan else []
        if len(order) == 1 and not harness.tokens("late"):
            now_s[0] = 3.0 - 1.2 * needed_s
    assert order == ["patient0", "late", "patient1", "patient2"]
    harness.finish()
    assert harness.reason("late") is FinishReason.LENGTH


def test_a_promise_that_is_not_at_risk_waits_for_its_turn() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    harness.scheduler.admission.costs = MACHINE
    harness.add(*(a_request(f"patient{i}") for i in range(2)), a_request("safe", deadline_s=1000.0))
    harness.finish()
    admitted = [row.request.request_id for plan in harness.runner.plans for row in plan.rows if row.is_admission]
    assert admitted == ["patient0", "patient1", "safe"]


def test_who_has_waited_too_long_to_end_in_time_is_dropped_before_it_costs_a_step() -> None:
    now_s = [0.0]
    harness = Harness(a_config(max_num_seqs=1), clock=lambda: now_s[0])
    harness.scheduler.admission.costs = MACHINE
    harness.add(a_request("runs", max_tokens=30), a_request("waits", max_tokens=30, deadline_s=1.0))
    harness.step()
    now_s[0] = 0.5
    harness.step()
    assert harness.reason("waits") is None
    now_s[0] = 0.9
    harness.step()
    assert harness.reason("waits") is FinishReason.EXPIRED
    assert harness.emissions["waits"][-1].error == DEADLINE_LOST
    assert all(row.request.request_id == "runs" for plan in harness.runner.plans for row in plan.rows)
    harness.finish()
