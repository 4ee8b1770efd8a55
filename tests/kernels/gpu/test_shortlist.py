"""Rows that are cut, decided among the lists of their parts or in the whole row: the draws of the sorted definition."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.draws import draw_keys, scale
from engine.sampling.truncation import keep_min_p, keep_top_p, select_top_k
from kernels.token_choice import launch
from kernels.token_choice.launch import choose_tokens, counters
from kernels.token_choice.reference import gumbel_noise, race
from tests.kernels.gpu.conftest import DEVICE

PART, KEPT = 256, 32
SEED = 11


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Make parts and lists so small that rows of a few hundred logits have many, and lists too short for some cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "BLOCK", 256)
        patch.setattr(launch, "PART", PART)
        patch.setattr(launch, "KEPT", KEPT)
        yield


def chosen(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Choose by the kernel, at as many positions as there are rows."""
    rows = len(logits)
    least = math.log(min_p) if min_p else -math.inf
    knobs = torch.tensor([[temperature, least, top_k, top_p]], dtype=torch.float64, device=DEVICE).repeat(rows, 1)
    seeds = torch.tensor([(SEED, position) for position in range(rows)], device=DEVICE)
    tokens: list[int] = choose_tokens(logits.to(DEVICE), knobs, seeds, counters(rows, DEVICE)).tolist()
    return tokens


def chosen_by_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    rows, vocab = logits.shape
    candidates = select_top_k(scale(logits, torch.full((rows, 1), temperature)), min(top_k, vocab) or vocab)
    assert candidates.token_ids is not None
    scores = candidates.scores
    if top_p < 1:
        scores = keep_top_p(scores, torch.full((rows, 1), top_p))
    if min_p:
        scores = keep_min_p(scores, torch.full((rows, 1), min_p))
    noise = gumbel_noise(draw_keys([SEED] * rows, range(rows), torch.device("cpu")), candidates.token_ids)
    won = race(scores, noise).unsqueeze(1)
    tokens: list[int] = candidates.token_ids.gather(1, won).flatten().tolist()
    return tokens


@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.6, 20, 0.95, 0.0),  # Qwen3's makers
        (0.6, 0, 0.9, 0.0),  # Llama 3's
        (1.0, 20, 1.0, 0.0),
        (1.0, 300, 0.9, 0.0),  # more than the lists are sure of
        (1.0, 5000, 1.0, 0.0),  # more than there are
        (1.0, 0, 0.999, 0.0),
        (2.0, 0, 1.0, 0.05),
        (2.0, 0, 1.0, 1e-9),
        (1.0, 40, 0.9, 0.1),
        (1e-3, 50, 0.9, 0.0),
    ],
)
def test_a_draw_is_the_definitions(temperature: float, top_k: int, top_p: float, min_p: float, spread: float) -> None:
    logits = torch.randn(4, 5 * PART - 7, generator=torch.Generator().manual_seed(top_k)) * spread
    asked = temperature, top_k, top_p, min_p
    assert chosen(logits, *asked) == chosen_by_definition(logits, *asked)


@pytest.mark.parametrize("top_k", [0, 5])
def test_parts_of_masked_tokens_only_have_none_to_list(top_k: int) -> None:
    logits = torch.full((8, 4 * PART), -torch.inf)
    logits[:, PART + 3 : PART + 10] = torch.arange(7.0)
    logits[:, -1] = 3.5
    asked = 1.0, top_k, 0.9, 0.0
    assert chosen(logits, *asked) == chosen_by_definition(logits, *asked)


@settings(max_examples=20, deadline=None)
@given(
    levels=st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=150),
    repeats=st.integers(min_value=1, max_value=6),
    top_k=st.integers(min_value=0, max_value=400),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
)
def test_of_equal_tokens_those_of_the_lowest_ids_are_kept(
    levels: list[int], repeats: int, top_k: int, top_p: float
) -> None:
    # Level 4 is masked; so many are equal that no edge leaves as many as a list should have.
    logits = torch.tensor([0.0, -0.5, -2.0, -7.0, -torch.inf])[levels].repeat(4, repeats)
    if logits.max() == -torch.inf:
        return
    assert chosen(logits, 1.0, top_k, top_p, 0.0) == chosen_by_definition(logits, 1.0, top_k, top_p, 0.0)


def test_a_row_that_cannot_be_used_says_so() -> None:
    logits = torch.randn(3, 3 * PART)
    logits[0, -1] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    assert chosen(logits, 1.0, 20, 0.9, 0.0) == [-1] * 3
