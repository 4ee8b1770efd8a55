from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.edits import LogitEdits
from engine.sampling.sampler import Sampler
from tests.engine.test_sampler import CPU, EOS, VOCAB, make_logits, make_params, make_request, sample_once


def test_whoever_asks_for_nothing_has_no_edits() -> None:
    assert LogitEdits.of(make_params(), VOCAB, []) is None


def test_a_bias_is_added_and_ids_given_twice_count_twice() -> None:
    edits = LogitEdits.of(make_params(logit_bias=((3, 1.5), (4, -2.0), (3, 1.0))), VOCAB, [])  # type: ignore[arg-type]
    assert edits is not None
    assert dict(zip(edits.biased_ids.tolist(), edits.biases.tolist(), strict=True)) == {3: 2.5, 4: -2.0}


def test_only_allowed_tokens_are_drawn() -> None:
    logits = make_logits(200)
    params = [make_params(allowed_token_ids=(5, 9, 11), seed=seed) for seed in range(200)]
    drawn = sample_once(logits, params, [[] for _ in params]).token_ids
    assert set(drawn) == {5, 9, 11}


def test_a_bias_can_force_a_token_and_the_log_probability_is_the_models_own() -> None:
    logits = make_logits(1)
    (params,) = [make_params(temperature=0, logit_bias=((7, 100.0),), num_logprobs=2)]  # type: ignore[arg-type]
    found = sample_once(logits, [params], [[]])
    assert found.token_ids == [7]
    expected = torch.log_softmax(logits[0], dim=-1)
    assert found.logprobs[0].logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert [token_id for token_id, _ in found.logprobs[0].top] == expected.topk(2).indices.tolist()


def test_rows_are_told_as_many_as_they_ask_for() -> None:
    params = [make_params(num_logprobs=count) if count is not None else make_params() for count in (0, None, 3)]
    found = sample_once(make_logits(3), params, [[], [], []])
    assert {row: len(entry.top) for row, entry in found.logprobs.items()} == {0: 0, 2: 3}


@given(
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    prior=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 50),
)
def test_a_bad_word_never_comes(words: list[tuple[int, ...]], prior: list[int], seed: int) -> None:
    params = make_params(bad_words=tuple(words), temperature=0, allowed_token_ids=(0, 1, 2, 3, 4, 5, 6))
    sampler = Sampler(1, VOCAB, CPU, EOS)
    sampler.admit(0, make_request(params), prior)
    output = list(prior)
    for position in range(30):
        output += sampler.sample(make_logits(1, seed=seed + position), [0], [position + 2]).token_ids
    new = range(len(prior), len(output))
    assert not any(tuple(output[end - len(word) + 1 : end + 1]) == word for end in new for word in words)


def test_the_last_token_of_a_bad_word_may_come_where_the_others_did_not() -> None:
    params = make_params(bad_words=((4, 5, 6), (7, 6)), temperature=0, logit_bias=((6, 100.0),))  # type: ignore[arg-type]
    for output, may_come in (([], True), ([5], True), ([5, 5], True), ([4, 5], False), ([7], False), ([7, 5], True)):
        assert (sample_once(make_logits(1), [params], [output]).token_ids == [6]) is may_come, output


def test_what_is_not_finite_is_still_seen() -> None:
    logits = make_logits(1)
    logits[0, 4] = torch.nan
    assert sample_once(logits, [make_params(allowed_token_ids=(1, 2))], [[]]).failed


def test_ids_that_the_model_does_not_have_are_left_out() -> None:
    params = make_params(
        logit_bias=((VOCAB, 5.0),),
        allowed_token_ids=(4, VOCAB + 3),
        bad_words=((VOCAB + 1,), (1, VOCAB)),
        temperature=0,  # type: ignore[arg-type]
    )
    assert sample_once(make_logits(1), [params], [[1]]).token_ids == [4]
