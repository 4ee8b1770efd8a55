"""The forecast by itself: exact where it can be worked out by hand, and never better for a longer queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.forecast import Backlog, EngineCapacity, Load, forecast
from tests.engine.simulated import ExactCosts

COSTS = ExactCosts(base_s=0.01, row_s=0.001, token_s=0.0001)
CAPACITY = EngineCapacity(num_rows=2, num_blocks=100, prompt_tokens=50)
LOADS = st.builds(
    Load,
    prompt_tokens=st.integers(1, 200),
    output_tokens=st.integers(1, 60),
    num_blocks=st.integers(1, 120),
    deadline_s=st.none() | st.floats(0, 5),
)
MANY = st.lists(LOADS, max_size=6).map(tuple)
RUNNING = st.lists(LOADS, max_size=2).map(tuple)


def test_alone_it_is_its_prompt_and_a_step_for_each_token() -> None:
    found = forecast(Load(100, 10, 7), Backlog(), CAPACITY, COSTS, 0.0)
    # Two steps compute the prompt, the second draws the first token; nine more follow.
    assert found.end_s == found.alone_s == pytest.approx(11 * 0.011 + 100 * 0.0001)
    assert found.start_s == 0


def test_it_waits_for_the_row_that_is_free_first_and_for_the_prompts_before_it() -> None:
    backlog = Backlog(running=(Load(1, 30, 5), Load(1, 4, 5)), waiting=(Load(50, 6, 5),))
    found = forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0)
    # The one before it begins in the row that is free after 4 steps, computes 1, draws 5 more: free after 10. It misses
    # the step under way.
    assert found.start_s == pytest.approx(11 * 0.012 + 50 * 0.0001)
    assert found.end_s == pytest.approx((11 + 1 + 2) * 0.012 + 100 * 0.0001)


def test_it_waits_for_blocks_where_rows_are_free() -> None:
    backlog = Backlog(running=(Load(1, 30, 60),))
    assert forecast(Load(50, 3, 40), backlog, CAPACITY, COSTS, 0.0).start_s < 2 * 0.012
    assert forecast(Load(50, 3, 41), backlog, CAPACITY, COSTS, 0.0).start_s > 30 * 0.012
    # What has ended gives its blocks back: the one before it and itself go on side by side.
    backlog = Backlog(running=(Load(1, 30, 60),), waiting=(Load(1, 9, 60),))
    assert forecast(Load(50, 3, 40), backlog, CAPACITY, COSTS, 0.0).start_s == pytest.approx(31 * 0.012)


def test_its_prompt_waits_for_those_that_running_requests_still_compute() -> None:
    backlog = Backlog(running=(Load(120, 30, 5),))
    assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).start_s == pytest.approx(3.4 * 0.012 + 120 * 0.0001)


def test_it_waits_for_no_row_that_another_flow_gives_up() -> None:
    backlog = Backlog(running=(Load(1, 30, 5), Load(1, 40, 5)))
    assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).start_s > 30 * 0.012
    backlog = backlog._replace(takes_row=True)
    assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).start_s < 2 * 0.012
    # Those of its flow that came before it do.
    backlog = backlog._replace(waiting=(Load(1, 5, 5),))
    assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).start_s > 30 * 0.012


def test_it_tells_whose_deadline_it_would_break() -> None:
    backlog = Backlog(running=(Load(1, 10, 5, 7.122),))
    found = forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 7.0)
    # Alone in the batch it ends after 10 steps of 11 ms, with another and its prompt after 125 ms.
    assert found.breaks_s == pytest.approx(0.11)
    for hopeless_or_easy_s in (0.1, 0.2):
        backlog = Backlog(running=(Load(1, 10, 5, hopeless_or_easy_s),))
        assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).breaks_s == 0


def test_those_who_wait_for_a_row_make_no_step_longer() -> None:
    """Else deadlines would count as lost behind a long queue, and new requests might break them."""
    backlog = Backlog(running=(Load(1, 10, 5, 0.122), Load(1, 30, 5)), waiting=(Load(1, 5, 5),) * 5)
    # Ten steps of two rows, and five milliseconds for the prompt of the asking one.
    assert forecast(Load(50, 3, 5), backlog, CAPACITY, COSTS, 0.0).breaks_s == pytest.approx(0.12)


@given(load=LOADS, running=RUNNING, waiting=MANY, place=st.integers(0, 6), another=LOADS, takes_row=st.booleans())
def test_one_more_before_it_never_makes_it_earlier(
    load: Load, running: tuple[Load, ...], waiting: tuple[Load, ...], place: int, another: Load, takes_row: bool
) -> None:
    longer = (*waiting[:place], another, *waiting[place:])
    found = forecast(load, Backlog(running, waiting, takes_row), CAPACITY, COSTS, 0.0)
    later = forecast(load, Backlog(running, longer, takes_row), CAPACITY, COSTS, 0.0)
    slack = 1 - 1e-9
    assert later.start_s >= slack * found.start_s
    assert later.end_s >= slack * found.end_s


@given(load=LOADS, running=RUNNING, waiting=MANY)
def test_nobody_is_faster_in_company_than_alone(
    load: Load, running: tuple[Load, ...], waiting: tuple[Load, ...]
) -> None:
    found = forecast(load, Backlog(running, waiting), CAPACITY, COSTS, 0.0)
    assert found.start_s <= found.end_s
    assert found.alone_s <= found.end_s * (1 + 1e-9)
