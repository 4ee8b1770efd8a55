from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import TokenLogprobs
from engine.sampling.draws import draw_keys, read_told, scale
from kernels.token_choice.reference import gumbel_noise_of_all
from kernels.token_logprobs.reference import tell
from tests.oracles import naive_sampler

CPU = torch.device("cpu")


def test_a_tiny_temperature_is_nearly_greedy_and_overflows_nowhere() -> None:
    scores = scale(torch.tensor([[3.0, 4.0, -5.0]]), torch.tensor([[1e-45]]))
    assert scores[0, 1] == 0
    assert (scores[0, [0, 2]] < -1e20).all()
    assert not scores.isnan().any()


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 30))
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    noise = gumbel_noise_of_all(draw_keys([seed], [position], CPU), 31)[0, token].item()
    assert abs(noise - naive_sampler.noise(seed, position, token)) < 1e-4 * max(1.0, abs(noise))


def test_noise_does_not_depend_on_the_other_rows() -> None:
    crowd = gumbel_noise_of_all(draw_keys([1, 2, 3], [9, 8, 7], CPU), 100)
    alone = gumbel_noise_of_all(draw_keys([2], [8], CPU), 100)
    assert torch.equal(crowd[1:2], alone)


def test_seeds_that_differ_in_any_word_and_positions_give_other_noise() -> None:
    keys = draw_keys([0, 1, 1 << 32, 0], [0, 0, 0, 1], CPU)
    noise = gumbel_noise_of_all(keys, 16)
    assert len({tuple(line) for line in noise.tolist()}) == 4


def test_another_process_draws_the_same_noise() -> None:
    program = (
        "import torch; from engine.sampling.draws import draw_keys;"
        "from kernels.token_choice.reference import gumbel_noise_of_all;"
        "n = gumbel_noise_of_all(draw_keys([123456789012345], [77], torch.device('cpu')), 64);"
        "print(n[0].numpy().tobytes().hex())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    here = gumbel_noise_of_all(draw_keys([123456789012345], [77], CPU), 64)
    assert here[0].numpy().tobytes().hex() == there


def logprobs_of(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    return read_told(tell(logits, torch.tensor(token_ids, dtype=torch.int64), num_top))


def test_log_probabilities_tell_each_row_s_token_and_the_likeliest_by_ascending_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 0.0, 0.0, 0.0]])
    expected = torch.log_softmax(logits, dim=-1)
    first, second = logprobs_of(logits, [3, 0], 2)
    assert first.logprob == pytest.approx(float(expected[0, 3]))
    assert [token_id for token_id, _ in first.top] == [1, 2]
    assert second.top[0] == (0, pytest.approx(second.logprob))
    assert (first.rank, second.rank) == (4, 1)
    assert [entry.rank for entry in logprobs_of(logits, [2, 1], 0)] == [1, 2]


def test_none_of_the_likeliest_is_told_or_more_than_there_are() -> None:
    logits = torch.randn(2, 4)
    assert [entry.top for entry in logprobs_of(logits, [0, 1], 0)] == [(), ()]
    assert [len(entry.top) for entry in logprobs_of(logits, [0, 1], 20)] == [4, 4]
    assert logprobs_of(torch.empty(0, 4), [], 3) == []
