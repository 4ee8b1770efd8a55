from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.draws import draw_keys, uniforms
from engine.sampling.sampler import Sampler
from engine.sampling.truncation import (
    exclude_top_choices,
    keep_epsilon,
    keep_eta,
    keep_min_p,
    keep_top_n_sigma,
    keep_top_p,
    keep_typical,
    select_top_k,
)
from tests.engine.test_sampler import CPU, make_params, make_request

# Multiples of 1/8 are exact in float32, and make ties likely.
LOGITS = st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=1, max_size=40)
SCORES = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def column(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


def left(scores: torch.Tensor) -> list[int]:
    return scores[0].isfinite().nonzero().squeeze(1).tolist()


@settings(max_examples=50, deadline=None)
@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_exactly_k_of_the_likeliest_and_breaks_ties_by_id(values: list[float], k: int) -> None:
    candidates = select_top_k(row(values), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert candidates.token_ids is not None
    assert candidates.token_ids[0].tolist() == expected
    assert candidates.scores[0].tolist() == [values[i] for i in expected]


@settings(max_examples=50, deadline=None)
@given(LOGITS, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_has_the_mass(values: list[float], top_p: float) -> None:
    scores = select_top_k(row(values), len(values)).scores
    is_kept = keep_top_p(scores, torch.tensor([[top_p]]))[0].isfinite()
    mass = torch.softmax(scores.double(), -1)[0]
    count = int(is_kept.sum())
    assert is_kept[:count].all()
    assert count >= 1
    tolerance = 1e-6
    assert mass[:count].sum() >= top_p - tolerance
    assert count == 1 or mass[: count - 1].sum() < top_p + tolerance


def test_equally_likely_tokens_are_cut_exactly_wherever_their_scores_lie() -> None:
    for tenths in range(100):
        scores = torch.full((1, 16), -tenths / 10)
        assert keep_top_p(scores, torch.tensor([[11 / 16]]))[0].isfinite().tolist() == [True] * 11 + [False] * 5, tenths
        assert keep_min_p(scores, torch.tensor([[1.0]])).isfinite().all()


def test_zero_is_as_likely_as_the_zero_below_it() -> None:
    token_ids = select_top_k(row([-0.0, 0.0, -0.0]), 3).token_ids
    assert token_ids is not None
    assert token_ids.tolist() == [[0, 1, 2]]


@settings(max_examples=50, deadline=None)
@given(LOGITS, st.floats(0.0, 1.0))
def test_min_p_keeps_tokens_by_their_ratio_to_the_likeliest(values: list[float], min_p: float) -> None:
    scores = row(values)
    probabilities = torch.softmax(scores.double(), -1)[0]
    ratio = probabilities / probabilities.max()
    is_kept = keep_min_p(scores, torch.tensor([[min_p]]))[0].isfinite()
    clear = (ratio - min_p).abs() > 1e-5
    assert torch.equal(is_kept[clear], (ratio >= min_p)[clear])
    assert is_kept[probabilities.argmax()]


def test_a_row_of_nan_does_not_disturb_its_neighbours() -> None:
    scores = torch.stack([torch.full((8,), torch.nan), torch.arange(8.0)])
    candidates = select_top_k(scores, 3)
    assert candidates.token_ids is not None
    assert candidates.token_ids[1].tolist() == [7, 6, 5]


def test_each_keeps_what_its_paper_says() -> None:
    assert left(keep_epsilon(SCORES, column(0.1))) == [0, 1, 2]
    assert left(keep_epsilon(SCORES, column(0.9))) == [0]
    # The entropy is 1.875 bits: the second token, of 2 bits, is the most typical, and then the first.
    assert left(keep_typical(SCORES, column(0.2))) == [1]
    assert left(keep_typical(SCORES, column(0.5))) == [0, 1]
    # sqrt(0.2) * 2^-1.875 = 0.12
    assert left(keep_eta(SCORES, column(0.2))) == [0, 1, 2]
    assert left(keep_top_n_sigma(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), column(1.0))) == [0]
    assert left(keep_top_n_sigma(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), column(2.0))) == [0, 1]


def test_each_row_keeps_its_own_likeliest() -> None:
    flat, peaked = torch.full((5,), 0.2).log(), torch.tensor([0.96, 0.01, 0.01, 0.01, 0.01]).log()
    for keep in (keep_epsilon, keep_eta):
        kept = keep(torch.stack([flat, peaked]), torch.tensor([[0.99], [0.99]]))
        assert kept.isfinite().tolist() == [[True] * 5, [True] + [False] * 4]


def test_the_likeliest_are_left_out_but_the_last_of_them() -> None:
    always, never = column(1.0), column(0.0)
    uniform = torch.tensor([[0.5]], dtype=torch.float64)
    assert left(exclude_top_choices(SCORES, column(0.1), always, uniform)) == [2, 3, 4]
    assert left(exclude_top_choices(SCORES, column(0.4), always, uniform)) == [0, 1, 2, 3, 4]
    assert left(exclude_top_choices(SCORES, column(0.1), never, uniform)) == [0, 1, 2, 3, 4]
    # A threshold of nothing, as one of 1e-46 is, took masked tokens for the least likely and left no other.
    masked = SCORES.masked_fill(torch.arange(5) == 0, -torch.inf)
    assert left(exclude_top_choices(masked, column(0.0), always, uniform)) == [3, 4]
    assert left(exclude_top_choices(SCORES, column(0.1), column(0.5), uniform)) == [0, 1, 2, 3, 4]


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.integers(0, 99))
def test_what_asks_for_nothing_changes_nothing_and_one_is_always_left(values: list[float], seed: int) -> None:
    scores = torch.tensor([values, values])
    nothing = [
        (keep_top_n_sigma, torch.inf, 0.0),
        (keep_typical, 1.0, 1e-9),
        (keep_epsilon, 0.0, 0.99),
        (keep_eta, 0.0, 0.99),
    ]
    for keep, neutral, harsh in nothing:
        found = keep(scores, torch.tensor([[neutral], [harsh]]))
        assert torch.equal(found[0], scores[0]), keep
        assert found[1].isfinite().any(), keep
    found = exclude_top_choices(scores, column(1e-9), column(1.0), torch.zeros(2, 1, dtype=torch.float64))
    assert found.isfinite().any(dim=-1).all()


def test_xtc_strikes_as_often_as_it_is_asked_to() -> None:
    keys = draw_keys(list(range(4000)), [7] * 4000, CPU)
    found = uniforms(keys)
    assert float((found < 0.25).double().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(found, uniforms(keys))
    sampler = Sampler(1, 5, CPU, ())
    drawn = []
    for seed in range(400):
        sampler.admit(0, make_request(make_params(seed=seed, xtc_probability=0.5, xtc_threshold=0.1)), [])
        drawn += sampler.sample(SCORES.clone(), [0], [3]).token_ids
    # Of the halves one has half of its mass on the first token, the other none.
    assert drawn.count(0) / 400 == pytest.approx(0.25, abs=0.07)
