from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.random import draw_keys
from kernels.token_choice.reference import gumbel_noise_of_all
from tests.oracles import naive_sampler

CPU = torch.device("cpu")


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
        "import torch; from engine.sampling.random import draw_keys;"
        "from kernels.token_choice.reference import gumbel_noise_of_all;"
        "n = gumbel_noise_of_all(draw_keys([123456789012345], [77], torch.device('cpu')), 64);"
        "print(n[0].numpy().tobytes().hex())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    here = gumbel_noise_of_all(draw_keys([123456789012345], [77], CPU), 64)
    assert here[0].numpy().tobytes().hex() == there
