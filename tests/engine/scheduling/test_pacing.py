"""Simulated machines: steps come to take the time that streams may wait, whatever a token costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.pacing import MIN_TOKENS, PrefillPace

TARGET_S = 0.2


@given(token_s=st.floats(1e-5, 5e-3), decodes_s=st.floats(0, 0.1))
def test_steps_settle_near_the_target_on_any_machine(token_s: float, decodes_s: float) -> None:
    pace = PrefillPace(TARGET_S, 1024)
    for _ in range(30):
        pace.observe(pace.num_tokens, decodes_s + pace.num_tokens * token_s)
    took_s = decodes_s + pace.num_tokens * token_s
    if MIN_TOKENS < pace.num_tokens < 1024:
        assert 0.5 * TARGET_S < took_s < 1.2 * TARGET_S
    elif pace.num_tokens == 1024:
        assert took_s < 1.2 * TARGET_S


def test_a_machine_that_slows_down_is_noticed_in_one_step() -> None:
    pace = PrefillPace(TARGET_S, 1024)
    for _ in range(30):
        pace.observe(pace.num_tokens, pace.num_tokens * 0.0005)
    before = pace.num_tokens
    pace.observe(before, before * 0.005)
    assert pace.num_tokens == pytest.approx(before / 10, abs=1)


@given(steps=st.lists(st.tuples(st.integers(0, 4096), st.floats(0, 1e4))), max_tokens=st.integers(1, 2000))
def test_nothing_observed_leads_out_of_the_bounds(steps: list[tuple[int, float]], max_tokens: int) -> None:
    pace = PrefillPace(TARGET_S, max_tokens)
    for num_tokens, took_s in steps:
        pace.observe(num_tokens, took_s)
        assert min(MIN_TOKENS, max_tokens) <= pace.num_tokens <= max_tokens


def test_steps_of_decodes_say_nothing() -> None:
    pace = PrefillPace(TARGET_S, 1024)
    before = pace.num_tokens
    pace.observe(0, 1.0)
    pace.observe(3, 1.0)
    assert pace.num_tokens == before


def test_without_a_target_only_the_upper_bound_applies() -> None:
    pace = PrefillPace(None, 1024)
    pace.observe(1024, 60.0)
    assert pace.num_tokens == 1024


@given(num_tokens=st.integers(1, 200), decodes_s=st.floats(0.05, 0.1))
def test_short_prompts_in_time_do_not_lower_what_long_ones_may_take(num_tokens: int, decodes_s: float) -> None:
    """Beside many decodes, a step of 20 tokens takes most of the target; after ten, a document got 41 a step."""
    pace = PrefillPace(TARGET_S, 1024)
    for _ in range(30):
        pace.observe(pace.num_tokens, decodes_s + pace.num_tokens * 0.0004)
    before = pace.num_tokens
    for _ in range(10):
        pace.observe(num_tokens, decodes_s + num_tokens * 0.0004)
    assert pace.num_tokens >= before
