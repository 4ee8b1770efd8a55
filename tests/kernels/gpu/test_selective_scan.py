"""The selective scan against its reference in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.selective_scan import launch
from kernels.selective_scan.reference import selective_scan
from kernels.state_rows import StateRows
from tests.kernels.gpu.conftest import DEVICE, DTYPES, TOLERANCE, assert_near, dtypes_and_lengths, randn

Sizes = tuple[int, int, int, int]
"""Heads, groups, width of heads and of states."""
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def inputs(rows: int, tokens: int, sizes: Sizes, dtype: torch.dtype) -> Inputs:
    """x, dt, a, b, c and d; x, b and c are parts of one tensor, as a convolution leaves them."""
    heads, groups, head_dim, state_dim = sizes
    widths = [heads * head_dim, groups * state_dim, groups * state_dim]
    mixed = randn(rows, tokens, sum(widths) + 3, dtype=dtype)[..., 3:].split(widths, dim=-1)
    x, (b, c) = mixed[0].unflatten(-1, (heads, -1)), (part.unflatten(-1, (groups, -1)) for part in mixed[1:])
    dt, a = torch.rand(rows, tokens, heads, device=DEVICE), -torch.rand(heads, device=DEVICE)
    return x, dt, a, b, c, randn(heads, dtype=torch.float32)


def check(given: Inputs, states: torch.Tensor) -> None:
    exact = states.double()
    expected = selective_scan(*(part if part is None else part.double() for part in given), exact)
    found = launch.selective_scan(*given, states)
    assert found.dtype is given[0].dtype
    assert_near(found, expected)
    # In float32, but of inputs rounded to the dtype where there are many tokens.
    slack = TOLERANCE[given[0].dtype]
    torch.testing.assert_close(states.double(), exact, atol=slack * float(exact.abs().max()), rtol=slack)


@pytest.mark.parametrize(("dtype", "tokens"), dtypes_and_lengths(1, 2, 63, 64, 65, 130))
@pytest.mark.parametrize("sizes", [(2, 1, 16, 16), (4, 2, 24, 40), (1, 1, 64, 128)])
def test_tokens_one_by_one_or_in_chunks_are_the_scan(dtype: torch.dtype, tokens: int, sizes: Sizes) -> None:
    heads, _, *dims = sizes
    check(inputs(2, tokens, sizes, dtype), randn(2, heads, *dims, dtype=torch.float32))


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 2),
    tokens=st.sampled_from([1, 3, 16, 35]),
    groups=st.integers(1, 2),
    share=st.integers(1, 2),
    head_dim=st.integers(1, 40),
    state_dim=st.integers(1, 40),
    has_d=st.booleans(),
)
def test_any_sizes_will_do(
    rows: int, tokens: int, groups: int, share: int, head_dim: int, state_dim: int, has_d: bool
) -> None:
    sizes = groups * share, groups, head_dim, state_dim
    *most, d = inputs(rows, tokens, sizes, torch.float32)
    states = randn(rows, groups * share, head_dim, state_dim, dtype=torch.float32)
    check((*most, d if has_d else None), states)


@pytest.mark.parametrize("steepness", [0.0, 30.0, 1e6])
def test_strong_decays_neither_overflow_nor_leave_anything(steepness: float) -> None:
    x, dt, a, b, c, d = inputs(1, 70, (2, 1, 16, 16), torch.float32)
    check((x, dt, a * steepness, b, c, d), randn(1, 2, 16, 16, dtype=torch.float32))


def test_a_token_that_ends_all_before_it_costs_no_digits_of_those_after_it() -> None:
    x, dt, a, b, c, d = inputs(1, 70, (2, 1, 16, 16), torch.float32)
    dt[0, 20], x[0, 20] = 1e6, 0
    states = randn(1, 2, 16, 16, dtype=torch.float32)
    exact = states.double()
    expected = selective_scan(*(part.double() for part in (x, dt, a, b, c, d)), exact)
    found = launch.selective_scan(x, dt, a, b, c, d, states)
    for part in (slice(0, 20), slice(20, 70)):
        assert_near(found[:, part], expected[:, part], 1.0)


@settings(deadline=None, max_examples=8)
@given(at=st.integers(1, 49), rows=st.integers(1, 2))
def test_a_text_in_two_parts_is_the_whole_text(at: int, rows: int) -> None:
    x, dt, a, b, c, d = inputs(rows, 50, (2, 1, 16, 16), torch.float32)
    states = randn(rows, 2, 16, 16, dtype=torch.float32)
    same = states.clone()
    expected = launch.selective_scan(x, dt, a, b, c, d, states)
    found = []
    for part in (slice(0, at), slice(at, None)):
        now = [whole[:, part].contiguous() for whole in (x, dt, b, c)]
        found.append(launch.selective_scan(now[0], now[1], a, *now[2:], d, same))
    assert_near(torch.cat(found, dim=1), expected, 1.0)
    assert_near(same, states, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_step_find_their_states(dtype: torch.dtype) -> None:
    """One begins, two are padding; states of others stay."""
    x, dt, a, b, c, d = inputs(4, 1, (4, 2, 16, 24), dtype)
    states = randn(6, 4, 16, 24, dtype=torch.float32)
    before, own = states.clone(), states[[3, 1]].clone()
    # What is taken for zeros need not even be finite.
    states[1] = torch.nan
    own[1] = 0
    expected = launch.selective_scan(x[:2], dt[:2], a, b[:2], c[:2], d, own)
    places = torch.tensor([3, 1, 5, 5], device=DEVICE)
    rows = StateRows(places, torch.tensor([False, True, True, True], device=DEVICE))
    found = launch.selective_scan(x, dt, a, b, c, d, states, rows)
    torch.testing.assert_close(found[:2], expected)
    torch.testing.assert_close(states[[3, 1]], own)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("tokens", [1, 70])
def test_what_is_not_finite_is_not_hidden(tokens: int) -> None:
    x, dt, a, b, c, d = inputs(2, tokens, (2, 1, 16, 16), torch.float32)
    b[0, 0, 0, 3] = dt[1, 0, 1] = torch.nan
    found = launch.selective_scan(x, dt, a, b, c, d, randn(2, 2, 16, 16, dtype=torch.float32))
    assert found[0].isnan().all()
    assert found[1, :, 1].isnan().all()
    assert found[1, :, 0].isfinite().all()
