from __future__ import annotations

import pytest
import torch

from kernels.gated_delta.reference import EPS, gated_delta
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near

CASES = {
    "a token": (1, 1, 2, 2, 128, 128),
    "tokens of many rows": (5, 1, 4, 2, 16, 16),
    "a prompt": (1, 150, 4, 2, 128, 128),
    "columns that do not fill a part": (2, 9, 6, 2, 32, 48),
    "more keys than values": (1, 20, 3, 3, 256, 16),
}
"""Rows, tokens, heads, heads of keys, width of keys and of values."""


def inputs(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, tokens, heads, key_heads, key_dim, value_dim = CASES[case]
    torch.manual_seed(5)
    q, k = (torch.randn(rows, tokens, key_heads, key_dim).to(dtype) for _ in range(2))
    v = torch.randn(rows, tokens, heads, value_dim).to(dtype)
    g, beta = -torch.rand(rows, tokens, heads), torch.rand(rows, tokens, heads)
    return [q, k, v, g, beta, torch.randn(rows, heads, key_dim, value_dim)]


def computed(pool: Pool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Call the kernel; of `q`, `k` and `v` each token's numbers must lie together."""
    rows, tokens, heads, value_dim = v.shape
    out = torch.full(v.shape, torch.nan, dtype=v.dtype)
    sizes = (tokens, heads, *k.shape[2:], value_dim, *(x.stride(1) for x in (q, k, v)))
    pool.call("gated_delta", v.dtype, rows, (q, k, v, *rest, out), sizes, (EPS, k.shape[-1] ** -0.5))
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, case: str) -> None:
    *given, state = inputs(case, dtype)
    exact = state.double()
    expected = gated_delta(*(x.double() for x in given), exact)
    assert_near(computed(pool, *given, state), expected)
    assert_near(state, exact)


def test_numbers_of_a_token_may_lie_among_others(pool: Pool) -> None:
    q, k, v, *rest, state = inputs("a prompt", torch.bfloat16)
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    parts = mixed.split([x.shape[2] * x.shape[3] for x in (q, k, v)], dim=-1)
    views = [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)]
    same = state.clone()
    assert torch.equal(computed(pool, *views, *rest, same), computed(pool, q, k, v, *rest, state))
    assert torch.equal(same, state)


def test_a_text_in_parts_is_the_text_and_rows_know_nothing_of_each_other(pool: Pool) -> None:
    *given, state = inputs("tokens of many rows", torch.float32)
    alone = torch.cat([computed(pool, *(x[i : i + 1] for x in given), state[i : i + 1].clone()) for i in range(5)])
    assert torch.equal(computed(pool, *given, state), alone)
    *given, state = inputs("a prompt", torch.float32)
    whole, parted = state.clone(), state
    parts = [computed(pool, *(x[:, a:b] for x in given), parted) for a, b in ((0, 1), (1, 64), (64, 149), (149, 150))]
    assert torch.equal(torch.cat(parts, dim=1), computed(pool, *given, whole))
    assert torch.equal(parted, whole)


def test_what_is_not_finite_is_not_hidden(pool: Pool) -> None:
    *given, state = inputs("a prompt", torch.float32)
    given[0][0, 7, 0, 3] = torch.nan
    assert computed(pool, *given, state)[0, 7, 0].isnan().all()
    state[0, 0, 0, 0] = torch.inf
    assert not computed(pool, *given, state)[0, :, 0, 0].isfinite().any()
