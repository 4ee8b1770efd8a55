"""The choice of tokens by the kernel: the draws of the reference, bit for bit in the tokens that they choose."""

from __future__ import annotations

import math

import pytest
import torch

from engine.gpu.choosing import TokenChooser
from engine.gpu.runtime import CudaRuntime
from engine.request import SamplingParams
from engine.sampling.draws import draw_keys
from kernels.token_choice import launch
from kernels.token_choice.launch import choose_tokens, counters
from kernels.token_choice.reference import gumbel_noise_of_all, race
from tests.kernels.gpu.conftest import DEVICE


def choose(
    logits: torch.Tensor,
    knobs: list[tuple[float, float]],
    seeds: list[tuple[int, int]],
    cuts: list[tuple[int, float]] | None = None,
) -> list[int]:
    settings = torch.cat(
        (torch.tensor(knobs, dtype=torch.float64), torch.tensor(cuts or [(0, 1.0)] * len(knobs), dtype=torch.float64)),
        dim=1,
    )
    settings = settings.to(DEVICE)
    arrived = counters(len(logits), DEVICE)
    chosen: list[int] = choose_tokens(logits.to(DEVICE), settings, torch.tensor(seeds, device=DEVICE), arrived).tolist()
    assert not arrived.any()
    return chosen


@pytest.mark.parametrize("part", [4096, 1 << 20])
@pytest.mark.parametrize("vocab", [1, 5, 2048, 10_007])
def test_a_draw_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch, vocab: int, part: int) -> None:
    monkeypatch.setattr(launch, "PART", part)
    rows = 12
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    temperatures = [0.0 if row % 4 == 0 else 0.2 + row / 8 for row in range(rows)]
    min_p = [0.0 if row % 3 else 0.1 for row in range(rows)]
    seeds = [row * 0x123456789AB - 5 for row in range(rows)]
    positions = [row * row for row in range(rows)]
    noise = gumbel_noise_of_all(draw_keys(seeds, positions, torch.device("cpu")), vocab)
    scores = logits - logits.amax(1, keepdim=True)
    scores /= torch.tensor(temperatures).clamp(min=1e-30).unsqueeze(1)
    scores = scores.masked_fill(scores < torch.tensor(min_p).log().unsqueeze(1), -torch.inf)
    expected = torch.where(torch.tensor(temperatures) == 0, logits.argmax(1), race(scores, noise))
    knobs = [(t, math.log(p) if p else -math.inf) for t, p in zip(temperatures, min_p, strict=True)]
    assert choose(logits, knobs, list(zip(seeds, positions, strict=True))) == expected.tolist()


@pytest.mark.parametrize("part", [1024, 4096])
def test_rows_that_cannot_be_used_say_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(launch, "BLOCK", 1024)
    monkeypatch.setattr(launch, "PART", part)
    logits = torch.zeros(5, 3000)
    logits[0, 2999] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    logits[3, :2000] = -torch.inf
    logits[4, 2500] = 1.0
    knobs = [(temperature, -math.inf) for temperature in (0.0, 1.0, 1.0, 1.0, 0.0)]
    found = choose(logits, knobs, [(1, 1)] * 5)
    assert found[:3] == [-1, -1, -1]
    assert found[3] >= 2000
    assert found[4] == 2500


@pytest.mark.parametrize("part", [1024, 8192])
def test_of_equal_logits_the_first_is_the_likeliest(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(launch, "BLOCK", 1024)
    monkeypatch.setattr(launch, "PART", part)
    logits = torch.zeros(2, 5000)
    logits[1, [4000, 3000, 4999]] = 2.0
    assert choose(logits, [(0.0, -math.inf)] * 2, [(0, 0)] * 2) == [0, 3000]


def test_a_chooser_hands_over_what_requests_ask_for() -> None:
    params = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, temperature=0.7, seed=(1 << 64) - 3, min_p=0.05, top_k=30, top_p=0.8),
    ]
    logits = torch.randn(2, 999, device=DEVICE)
    chosen = TokenChooser(CudaRuntime(DEVICE), 4, 999)(logits, params, [3, 9])
    cuts = [(0, 1.0), (30, 0.8)]
    expected = choose(logits, [(0.0, -math.inf), (0.7, math.log(0.05))], [(0, 3), (-3, 9)], cuts)
    assert chosen.tolist() == expected
