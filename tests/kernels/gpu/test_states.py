"""Kernels of layers that keep states, against their references in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.causal_conv import launch as conv_launch
from kernels.causal_conv.reference import causal_conv
from kernels.gated_delta import launch as delta_launch
from kernels.gated_delta.reference import gated_delta
from kernels.state_rows import StateRows
from tests.kernels.gpu.conftest import DEVICE, DTYPES, assert_near, dtypes_and_lengths, randn

Inputs = tuple[torch.Tensor, ...]


def delta_inputs(rows: int, tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """q, k, v, g and beta; the first three are parts of one tensor, as a convolution leaves them."""
    key_heads, heads, key_dim, value_dim = sizes
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    q, k, v = randn(rows, tokens, sum(widths) + 3, dtype=dtype)[..., 3:].split(widths, dim=-1)
    g, beta = -torch.rand(rows, tokens, heads, device=DEVICE), torch.rand(rows, tokens, heads, device=DEVICE)
    return q.unflatten(-1, (key_heads, -1)), k.unflatten(-1, (key_heads, -1)), v.unflatten(-1, (heads, -1)), g, beta


def check_delta(inputs: Inputs, state: torch.Tensor) -> None:
    exact = state.double()
    expected = gated_delta(*(x.double() for x in inputs), exact)
    found = delta_launch.gated_delta(*inputs, state)
    assert found.dtype is inputs[2].dtype
    assert_near(found, expected)
    torch.testing.assert_close(state.double(), exact, atol=_slack(inputs[0].dtype), rtol=_slack(inputs[0].dtype))


def _slack(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize(("dtype", "tokens"), dtypes_and_lengths(1, 2, 63, 64, 65, 150))
@pytest.mark.parametrize("sizes", [(1, 2, 16, 16), (2, 2, 24, 40), (1, 1, 128, 48)])
def test_tokens_one_by_one_or_in_chunks_follow_the_rule(
    dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int, int]
) -> None:
    _, heads, key_dim, value_dim = sizes
    state = randn(2, heads, key_dim, value_dim, dtype=torch.float32)
    check_delta(delta_inputs(2, tokens, sizes, dtype), state)


def test_the_same_key_again_and_again_loses_no_digits() -> None:
    """Which a series in powers of the matrix would."""
    q, k, v, g, beta = delta_inputs(1, 128, (1, 1, 16, 16), torch.float32)
    k = k[:, :1].expand(k.shape).contiguous()
    check_delta((q, k, v, torch.zeros_like(g), torch.ones_like(beta)), randn(1, 1, 16, 16, dtype=torch.float32))


def test_strong_decays_neither_overflow_nor_leave_anything() -> None:
    q, k, v, g, beta = delta_inputs(1, 70, (1, 1, 16, 16), torch.float32)
    check_delta((q, k, v, g * 200, beta), randn(1, 1, 16, 16, dtype=torch.float32))


@settings(deadline=None, max_examples=10)
@given(at=st.integers(1, 99), rows=st.integers(1, 2))
def test_a_text_in_two_parts_is_the_whole_text(at: int, rows: int) -> None:
    whole = delta_inputs(rows, 100, (1, 2, 16, 16), torch.float32)
    state = randn(rows, 2, 16, 16, dtype=torch.float32)
    same = state.clone()
    expected = delta_launch.gated_delta(*whole, state)
    first, second = ([x[:, part].contiguous() for x in whole] for part in (slice(0, at), slice(at, None)))
    found = torch.cat([delta_launch.gated_delta(*first, same), delta_launch.gated_delta(*second, same)], dim=1)
    assert_near(found, expected, 1.0)
    assert_near(same, state, 1.0)


def test_rows_of_a_step_find_their_states() -> None:
    """One begins, two are padding; states of others stay."""
    inputs = delta_inputs(4, 1, (1, 2, 16, 16), torch.float32)
    states = randn(6, 2, 16, 16, dtype=torch.float32)
    before, own = states.clone(), states[[3, 1]].clone()
    own[1] = 0
    expected = delta_launch.gated_delta(*(x[:2] for x in inputs), own)
    found = delta_launch.gated_delta(*inputs, states, held_rows())
    torch.testing.assert_close(found[:2], expected)
    torch.testing.assert_close(states[[3, 1]], own)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def held_rows() -> StateRows:
    places = torch.tensor([3, 1, 5, 5], device=DEVICE)
    return StateRows(places, torch.tensor([False, True, True, True], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_bias", "is_activated"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(("tokens", "channels", "width"), [(1, 5, 2), (3, 300, 4), (70, 65, 3)])
def test_a_text_is_convolved_with_what_comes_before(
    dtype: torch.dtype, has_bias: bool, is_activated: bool, tokens: int, channels: int, width: int
) -> None:
    x = randn(2, tokens, channels + 2, dtype=dtype)[..., 2:]
    weight, bias = randn(channels, width, dtype=dtype), randn(channels, dtype=dtype) if has_bias else None
    exact = [None if part is None else part.double() for part in (x, weight, bias)]
    expected = causal_conv(exact[0], None, exact[1], exact[2], is_activated=is_activated)
    assert_near(conv_launch.causal_conv(x, None, weight, bias, is_activated=is_activated), expected)
    for token in range(min(tokens, 5)):
        if token == 0:
            state = torch.zeros(2, channels, width, dtype=dtype, device=DEVICE)
        found = conv_launch.causal_conv(x[:, token : token + 1], state, weight, bias, is_activated=is_activated)
        assert_near(found, expected[:, token : token + 1])
        assert torch.equal(state[..., -1], x[:, token])


def test_rows_of_a_step_find_their_last_inputs() -> None:
    x, states = randn(4, 1, 40, dtype=torch.float32), randn(6, 40, 4, dtype=torch.float32)
    before, weight, own = states.clone(), randn(40, 4, dtype=torch.float32), states[[3, 1]].clone()
    own[1] = 0
    expected = conv_launch.causal_conv(x[:2], own, weight, None)
    found = conv_launch.causal_conv(x, states, weight, None, held_rows())
    torch.testing.assert_close(found[:2], expected)
    torch.testing.assert_close(states[[3, 1]], own)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])
