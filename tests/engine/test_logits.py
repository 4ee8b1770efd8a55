from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.logits import Penalties, keep_min_p, keep_top_p, penalize, scale, select_top_k
from tests.oracles import naive_sampler

# Multiples of 1/8 are exact in float32, and make ties likely.
LOGITS = st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=1, max_size=40)


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


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


@settings(max_examples=50, deadline=None)
@given(
    LOGITS,
    st.data(),
    st.sampled_from([1.0, 0.5, 1.3]),
    st.sampled_from([0.0, -1.5, 0.75]),
    st.sampled_from([0.0, -0.5, 2.0]),
)
def test_penalties_follow_their_definition(
    values: list[float], data: st.DataObject, repetition: float, frequency: float, presence: float
) -> None:
    token = st.integers(0, len(values) - 1)
    prompt = data.draw(st.lists(token, max_size=10))
    output = data.draw(st.lists(token, max_size=10))
    params = SamplingParams(
        max_tokens=1, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    in_prompt = torch.zeros(1, len(values), dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(values)).int().unsqueeze(0)
    factors = Penalties(
        repetition=torch.tensor([[repetition]]),
        frequency=torch.tensor([[frequency]]),
        presence=torch.tensor([[presence]]),
    )
    expected = naive_sampler.edited(values, params, prompt, output, ())
    torch.testing.assert_close(penalize(row(values), factors, in_prompt, counts), row(expected))


def test_a_tiny_temperature_is_nearly_greedy_and_overflows_nowhere() -> None:
    scores = scale(torch.tensor([[3.0, 4.0, -5.0]]), torch.tensor([[1e-45]]))
    assert scores[0, 1] == 0
    assert (scores[0, [0, 2]] < -1e20).all()
    assert not scores.isnan().any()


def test_a_row_of_nan_does_not_disturb_its_neighbours() -> None:
    scores = torch.stack([torch.full((8,), torch.nan), torch.arange(8.0)])
    candidates = select_top_k(scores, 3)
    assert candidates.token_ids is not None
    assert candidates.token_ids[1].tolist() == [7, 6, 5]
