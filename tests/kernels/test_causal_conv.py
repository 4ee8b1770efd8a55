from __future__ import annotations

import pytest
import torch

from kernels.causal_conv.reference import causal_conv
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near

CASES = {
    "a token of many rows": (5, 1, 128, 4),
    "a prompt": (1, 70, 208, 4),
    "fewer tokens than the width": (2, 3, 16, 8),
    "no wider than a token": (2, 5, 80, 1),
}
"""Rows, tokens, channels, width."""


def inputs(case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, tokens, channels, width = CASES[case]
    torch.manual_seed(5)
    shapes = ((rows, tokens, channels), (rows, channels, width), (channels, width), (channels,))
    x, state, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    return x, state, weight, bias


def computed(
    pool: Pool,
    x: torch.Tensor,
    state: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_activated: bool = True,
) -> torch.Tensor:
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    sizes = (x.shape[1], *weight.shape, x.stride(1), int(is_activated))
    pool.call("causal_conv", x.dtype, len(x), (x, state, weight, bias, y), sizes)
    return y


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_activated", [False, True])
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, case: str, is_activated: bool) -> None:
    x, state, weight, bias = inputs(case, dtype)
    exact = state.double()
    expected = causal_conv(x.double(), exact, weight.double(), bias.double(), is_activated=is_activated)
    assert_near(computed(pool, x, state, weight, bias, is_activated=is_activated), expected)
    assert torch.equal(state.double(), exact)


@pytest.mark.parametrize("case", CASES)
def test_a_text_may_begin_with_nothing_and_channels_without_a_bias(pool: Pool, case: str) -> None:
    x, _, weight, _ = inputs(case, torch.float32)
    assert_near(computed(pool, x, None, weight, None), causal_conv(x.double(), None, weight.double(), None))


def test_a_text_in_parts_is_the_text_wherever_its_tokens_lie(pool: Pool) -> None:
    x, state, weight, bias = inputs("a prompt", torch.bfloat16)
    among_others = torch.cat([torch.full_like(x, torch.nan), x], dim=-1)[..., x.shape[-1] :]
    whole, parted = state.clone(), state
    parts = [computed(pool, among_others[:, a:b], parted, weight, bias) for a, b in ((0, 1), (1, 3), (3, 70))]
    assert torch.equal(torch.cat(parts, dim=1), computed(pool, x, whole, weight, bias))
    assert torch.equal(parted, whole)


def test_what_is_not_finite_is_not_hidden(pool: Pool) -> None:
    x, state, weight, bias = inputs("a prompt", torch.float32)
    x[0, 5, 2] = torch.nan
    y = computed(pool, x, state, weight, bias)
    assert y[0, 5:9, 2].isnan().all()
    assert y[0, 9:].isfinite().all()
