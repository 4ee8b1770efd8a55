"""Where the kernel cuts a row: the very set of tokens that the sorted definition keeps, ties by their ids."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.draws import scale
from engine.sampling.truncation import keep_top_p, select_top_k
from kernels.token_choice.truncation import cut, distance_of, survey
from tests.kernels.gpu.conftest import DEVICE


@triton.jit
def kept_kernel(logits, kept, vocab, highest, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """Write which tokens of one row are kept."""
    high, cool = tl.load(highest), tl.load(temperature)
    mass, _, _ = survey(logits, vocab, high, cool, 28.0, True, BLOCK)
    part = tl.load(top_p).to(tl.float64)
    distance, last = cut(logits, vocab, high, cool, tl.load(top_k), part, mass.to(tl.float64), BLOCK)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        own = distance_of(tl.load(logits + token, mask=token < vocab, other=float("-inf")), high, cool)
        is_kept = (own < distance) | ((own == distance) & (token <= last))
        tl.store(kept + token, is_kept & (own < float("inf")), mask=token < vocab)


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, block: int = 512) -> list[int]:
    row = logits.to(DEVICE)
    found = torch.zeros(len(row), dtype=torch.bool, device=DEVICE)
    numbers = [
        torch.tensor(number, dtype=dtype, device=DEVICE)
        for number, dtype in ((temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32))
    ]
    kept_kernel[(1,)](row, found, len(row), row.max(), *numbers, BLOCK=block)
    ids: list[int] = found.nonzero().flatten().tolist()
    return ids


def kept_by_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    scores = scale(logits.unsqueeze(0), torch.tensor([[temperature]]))
    candidates = select_top_k(scores, top_k if 0 < top_k < len(logits) else len(logits))
    assert candidates.token_ids is not None
    left = candidates.scores if top_p >= 1 else keep_top_p(candidates.scores, torch.tensor([[top_p]]))
    ids: list[int] = candidates.token_ids[left > -torch.inf].sort().values.tolist()
    return ids


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 0.9), (0.3, 40, 1.0), (1.7, 40, 0.7), (1.0, 1, 1.0), (1.7, 900, 0.999), (0.3, 0, 0.97), (1.0, 0, 1e-6)],
)
def test_the_kept_tokens_are_those_of_the_definition(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(top_k)) * 4
    logits[::7] = -torch.inf
    assert kept(logits, temperature, top_k, top_p) == kept_by_definition(logits, temperature, top_k, top_p)


@settings(max_examples=25, deadline=None)
@given(
    levels=st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=150),
    top_k=st.integers(min_value=0, max_value=160),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.01]),
)
def test_of_equal_tokens_those_of_the_lowest_ids_are_kept(levels: list[int], top_k: int, top_p: float) -> None:
    # Level 4 is masked; the others are so far apart that float64 and whole numbers cannot disagree by rounding.
    logits = torch.tensor([0.0, -0.5, -2.0, -7.0, -torch.inf])[levels]
    if logits.max() == -torch.inf:
        return
    assert kept(logits, 1.0, top_k, top_p, block=64) == kept_by_definition(logits, 1.0, top_k, top_p)


def test_a_flat_row_is_cut_in_its_middle() -> None:
    assert kept(torch.zeros(1000), 1.0, 0, 0.5) == list(range(500))
    assert kept(torch.zeros(1000), 1.0, 10, 0.5) == list(range(5))


def test_a_tiny_temperature_leaves_the_likeliest() -> None:
    logits = torch.arange(200.0)
    assert kept(logits, 1e-30, 0, 0.9) == [199]
    assert kept(logits, 1e-3, 3, 1.0) == [197, 198, 199]
