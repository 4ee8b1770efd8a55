"""Simulated machines whose steps cost what the model says, and some that change their minds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.step_costs import MAX_AGE_S, MIN_STEPS, StepCosts
from engine.step import pairs_of

ROWS = 32


def measured(base_s: float, row_s: float, token_s: float, *, steps: int = 200, seed: int = 0) -> StepCosts:
    costs, rng = StepCosts(), random.Random(seed)
    for step in range(steps):
        rows, tokens = rng.randint(1, ROWS), rng.choice([0, 0, 0, rng.randint(16, 256)])
        took_s = base_s + rows * row_s + tokens * token_s
        costs.observe(num_decodes=rows, num_prompt_tokens=tokens, took_s=took_s, now_s=float(step))
    return costs


@settings(max_examples=30)
@given(base_s=st.floats(1e-4, 0.1), row_s=st.floats(0, 0.01), token_s=st.floats(1e-5, 1e-2), seed=st.integers(0, 9))
def test_what_a_step_costs_is_found_on_any_machine(base_s: float, row_s: float, token_s: float, seed: int) -> None:
    costs = measured(base_s, row_s, token_s, seed=seed)
    for rows in (1, ROWS // 2, ROWS):
        assert costs.step_s(rows) == pytest.approx(base_s + rows * row_s, rel=0.01)
    assert costs.prompt_s(256) == pytest.approx(256 * token_s, rel=0.05)


def test_a_step_of_prompts_alone_is_told_from_such_steps_whatever_the_others_hide() -> None:
    costs = StepCosts()
    assert costs.base_s is None
    costs.observe(num_decodes=0, num_prompt_tokens=64, took_s=0.003, now_s=0.0)
    for step in range(200):
        # Always as full, so that nobody can tell what the rows cost of it.
        tokens = 64 * (step % 2)
        costs.observe(num_decodes=ROWS, num_prompt_tokens=tokens, took_s=0.009 + tokens * 2e-5, now_s=0.0)
    costs.observe(num_decodes=0, num_prompt_tokens=64, took_s=0.003, now_s=0.0)
    assert costs.step_s(0) == pytest.approx(0.009)
    assert costs.base_s is not None
    assert costs.base_s + costs.prompt_s(64) == pytest.approx(0.003, rel=0.5)


@given(steps=st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, 512), st.floats(-1, 1e4)), max_size=60))
def test_nothing_measured_makes_time_negative_or_more_rows_faster(steps: list[tuple[int, int, float]]) -> None:
    costs = StepCosts()
    for rows, tokens, took_s in steps:
        costs.observe(num_decodes=rows, num_prompt_tokens=tokens, took_s=took_s, now_s=0.0)
    assert 0 <= costs.step_s(1) <= costs.step_s(ROWS)
    assert costs.prompt_s(100) >= 0


def test_one_step_that_waited_for_somebody_else_changes_little_and_many_are_believed() -> None:
    costs = measured(0.01, 0.0, 0.0)
    costs.observe(num_decodes=4, num_prompt_tokens=0, took_s=60.0, now_s=0.0)
    assert costs.step_s(4) < 0.012
    for _ in range(60):
        costs.observe(num_decodes=4, num_prompt_tokens=0, took_s=0.1, now_s=0.0)
    assert costs.step_s(4) == pytest.approx(0.1, rel=0.2)


def test_too_little_or_too_old_is_nothing() -> None:
    assert not measured(0.01, 0.0, 0.0, steps=MIN_STEPS - 1).is_known(0.0)
    costs = measured(0.01, 0.0, 0.0, steps=100)
    assert costs.is_known(99.0)
    assert not costs.is_known(100.0 + MAX_AGE_S)


def test_the_rate_of_prompt_tokens_follows_the_machine_and_does_not_listen_to_decodes() -> None:
    costs = StepCosts()
    assert costs.prompt_tokens_per_s == 0
    for took_s, expected in ((0.5, 1000), (1.0, 500)):
        for _ in range(100):
            costs.observe(num_decodes=0, num_prompt_tokens=500, took_s=took_s, now_s=0.0)
            costs.observe(num_decodes=2, num_prompt_tokens=2, took_s=0.1, now_s=0.0)
        assert costs.prompt_tokens_per_s == pytest.approx(expected, rel=0.02)


def test_what_a_token_of_a_draft_adds_is_learned_through_noise_and_nothing_else_of_such_steps() -> None:
    costs = measured(0.01, 0.0005, 2e-5)
    before = costs.step_s(4), costs.prompt_s(1)
    assert costs.draft_token_s == costs.prompt_s(1)
    noise = random.Random(1)
    for step in range(300):
        tokens = 1 + step % 9
        took_s = costs.step_s(4) + tokens * 3e-5 + noise.gauss(0, 2e-4)
        costs.observe(num_decodes=4, num_prompt_tokens=0, num_draft_tokens=tokens, took_s=took_s, now_s=float(step))
    assert costs.draft_token_s == pytest.approx(3e-5, rel=0.5)
    assert (costs.step_s(4), costs.prompt_s(1)) == before
    assert costs.is_known(300.0)


def test_one_disturbed_step_does_not_make_drafts_dear_for_ever() -> None:
    costs = measured(0.01, 0.0005, 2e-5)
    for _ in range(9):
        costs.observe(num_decodes=4, num_prompt_tokens=0, num_draft_tokens=1, took_s=60.0, now_s=0.0)
    assert costs.draft_token_s <= 4 * costs.prompt_s(1)


def test_drafts_are_never_thought_to_make_a_step_shorter() -> None:
    costs = measured(0.01, 0.0005, 2e-5)
    for _ in range(9):
        costs.observe(num_decodes=4, num_prompt_tokens=0, num_draft_tokens=8, took_s=1e-6, now_s=0.0)
    assert costs.draft_token_s == 0


@settings(max_examples=30)
@given(pair_s=st.floats(0, 1e-6), token_s=st.floats(1e-5, 1e-3), longest=st.integers(8, 100))
def test_what_a_long_context_takes_is_not_charged_to_short_prompts(pair_s: float, token_s: float, longest: int) -> None:
    costs, size = measured(0.01, 0.0, token_s), 1000
    for start in range(0, longest * size, size):
        pairs = int(pairs_of(start, start + size))
        took_s = 0.01 + size * token_s + pairs * pair_s
        costs.observe(num_decodes=4, num_prompt_tokens=size, num_pairs=pairs, took_s=took_s, now_s=0.0)
    # The first steps, in which the two cannot be told apart, count as tokens alone.
    assert 0.9 * size * token_s <= costs.prompt_s(size) <= 1.1 * (size * token_s + pairs_of(0, 2 * size) * pair_s)
    pairs = pairs_of((longest - 1) * size, longest * size)
    assert costs.prompt_s(size, pairs) == pytest.approx(size * token_s + pairs * pair_s, rel=0.2)


def test_a_step_of_few_rows_takes_time_however_much_larger_ones_differ() -> None:
    costs = StepCosts()
    for num_decodes in (8, 9) * 20:
        costs.observe(num_decodes=num_decodes, num_prompt_tokens=0, took_s=num_decodes - 7.0, now_s=0.0)
    assert costs.step_s(9) > costs.step_s(8) > costs.step_s(1) > 0
