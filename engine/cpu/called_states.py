"""Kernels for layers that keep states (gated delta rule, causal convolution), in place of functions of transformers.

Each function takes the original (`theirs`) first, then its arguments. It calls the original for what the kernels do not
support: other widths, other dtypes, texts packed into one row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.gated_delta.reference import EPS
from kernels.native import SUFFIX_BY_DTYPE
from kernels.program import Pool

MULTIPLE, MOST_KEYS, MOST_WIDTH = 16, 256, 8
"""Limits of the kernels: the divisor of widths, the widest key and the widest convolution."""


def state_functions(pool: Pool) -> dict[str, Callable[..., Any]]:
    """Return functions by the names that they replace in Qwen3.5, Qwen3-Next and others that share their layers."""
    return {
        "torch_chunk_gated_delta_rule": partial(_gated_delta, pool),
        "torch_recurrent_gated_delta_rule": partial(_gated_delta, pool),
        "causal_conv1d_fn": partial(_causal_conv, pool),
        "causal_conv1d_update": partial(_causal_conv_update, pool),
    }


def _gated_delta(
    pool: Pool,
    theirs: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    **told: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [rows, tokens, heads, dim] and the state, which the kernel updates in place."""
    switches = {name: told.pop(name, False) for name in ("output_final_state", "use_qk_l2norm_in_kernel")}
    if not (
        initial_state is not None
        and initial_state.dtype is torch.float32
        and initial_state.is_contiguous()
        and query.dtype is key.dtype is value.dtype
        and value.dtype in SUFFIX_BY_DTYPE
        and all(switches.values())
        and not any(argument is not None for argument in told.values())
        and not (key.shape[3] % MULTIPLE or value.shape[3] % MULTIPLE)
        and key.shape[3] <= MOST_KEYS
    ):
        found: tuple[torch.Tensor, torch.Tensor] = theirs(
            query, key, value, g=g, beta=beta, initial_state=initial_state, **switches, **told
        )
        return found
    query, key, value = (_side_by_side(x.flatten(2)).view(x.shape) for x in (query, key, value))
    out = value.new_empty(value.shape)
    numbers = query, key, value, g.float().contiguous(), beta.float().contiguous(), initial_state, out
    sizes = (*value.shape[1:3], *key.shape[2:], value.shape[3], *(_apart(x) for x in (query, key, value)))
    pool.call("gated_delta", value.dtype, len(value), numbers, sizes, (EPS, key.shape[3] ** -0.5))
    return out, initial_state


def _causal_conv(
    pool: Pool,
    theirs: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **told: Any,
) -> torch.Tensor:
    """Convolve [rows, channels, tokens] with no inputs before them."""
    if any(argument is not None for argument in told.values()) or not _can_convolve(hidden_states, weight, activation):
        return theirs(hidden_states, weight, bias, activation=activation, **told)
    return _convolved(pool, hidden_states, None, weight, bias)


def _causal_conv_update(
    pool: Pool,
    theirs: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve [rows, channels, tokens] after the inputs in `conv_state` [rows, channels, width], updated in place."""
    fits = (
        conv_state.dtype is hidden_states.dtype and conv_state.is_contiguous() and conv_state.shape[1:] == weight.shape
    )
    if not (fits and _can_convolve(hidden_states, weight, activation)):
        return theirs(hidden_states, conv_state, weight, bias, activation)
    return _convolved(pool, hidden_states, conv_state, weight, bias)


def _can_convolve(x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> bool:
    fits = weight.dtype is x.dtype and x.dtype in SUFFIX_BY_DTYPE and activation in ("silu", "swish")
    return fits and not weight.shape[0] % MULTIPLE and weight.shape[1] <= MOST_WIDTH


def _convolved(
    pool: Pool, x: torch.Tensor, state: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    x, weight = _side_by_side(x.transpose(1, 2)), weight.contiguous()
    y = x.new_empty(x.shape)
    pool.call("causal_conv", x.dtype, len(x), (x, state, weight, bias, y), (x.shape[1], *weight.shape, _apart(x)))
    return y.transpose(1, 2)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [rows, tokens, numbers] with each token contiguous and one stride between all tokens."""
    rows, tokens, _ = x.shape
    are_even = rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if x.stride(2) == 1 and are_even else x.contiguous()


def _apart(x: torch.Tensor) -> int:
    """Return the stride between tokens of a result of `_side_by_side`."""
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)
