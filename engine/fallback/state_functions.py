"""Functions that replace those of transformers in layers that keep states, by our kernels.

Each takes the original (`theirs`) first, then its arguments. It calls the original for what the kernels do not support:
other widths, other dtypes, texts packed into one row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.fallback.spec import StateKind
from engine.fallback.state_caches import HeldStates
from engine.state_kernels import MOST_KEYS, MOST_WIDTH, MULTIPLE, StateKernels

State = torch.Tensor | HeldStates
"""As a module gets it from its cache, which it passes on without looking at it."""

KIND_BY_FUNCTION: dict[str, StateKind] = {
    "torch_recurrent_gated_delta_rule": "recurrent",
    "causal_conv1d_update": "conv",
}
"""Functions for rows of one token, and which of a module's states they take as they are held."""


def state_functions(kernels: StateKernels) -> dict[str, Callable[..., Any]]:
    """Return functions by the names that they replace in Qwen3.5, Qwen3-Next and others that share their layers."""
    return {
        "torch_chunk_gated_delta_rule": partial(_gated_delta, kernels),
        "torch_recurrent_gated_delta_rule": partial(_gated_delta, kernels),
        "causal_conv1d_fn": partial(_causal_conv, kernels),
        "causal_conv1d_update": partial(_causal_conv_update, kernels),
    }


def _gated_delta(
    kernels: StateKernels,
    theirs: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: State | None = None,
    **told: Any,
) -> tuple[torch.Tensor, State | None]:
    """Return the outputs [rows, tokens, heads, dim] and the state, which the kernel updates in place."""
    switches = {name: told.pop(name, False) for name in ("output_final_state", "use_qk_l2norm_in_kernel")}
    states, rows = initial_state if isinstance(initial_state, HeldStates) else (initial_state, None)
    if not (
        states is not None
        and states.dtype is torch.float32
        and states.is_contiguous()
        and query.dtype is key.dtype is value.dtype
        and value.dtype in kernels.dtypes
        and all(switches.values())
        and not any(argument is not None for argument in told.values())
        and not (key.shape[3] % MULTIPLE or value.shape[3] % MULTIPLE)
        and key.shape[3] <= MOST_KEYS
    ):
        state = initial_state.gathered() if isinstance(initial_state, HeldStates) else initial_state
        found: tuple[torch.Tensor, torch.Tensor] = theirs(
            query, key, value, g=g, beta=beta, initial_state=state, **switches, **told
        )
        return found
    query, key, value = (_side_by_side(x.flatten(2)).view(x.shape) for x in (query, key, value))
    out = kernels.gated_delta(query, key, value, g.float().contiguous(), beta.float().contiguous(), states, rows)
    return out, initial_state


def _causal_conv(
    kernels: StateKernels,
    theirs: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **told: Any,
) -> torch.Tensor:
    """Convolve [rows, channels, tokens] with no inputs before them."""
    is_plain = not any(argument is not None for argument in told.values())
    if not (is_plain and _can_convolve(kernels, hidden_states, weight, activation)):
        return theirs(hidden_states, weight, bias, activation=activation, **told)
    x = _side_by_side(hidden_states.transpose(1, 2))
    return kernels.causal_conv(x, None, weight.contiguous(), bias).transpose(1, 2)


def _causal_conv_update(
    kernels: StateKernels,
    theirs: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    conv_state: State,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve [rows, channels, 1] after the inputs in `conv_state` [rows, channels, width], updated in place."""
    states, rows = conv_state if isinstance(conv_state, HeldStates) else (conv_state, None)
    fits = states.dtype is hidden_states.dtype and states.is_contiguous() and states.shape[1:] == weight.shape
    if fits and hidden_states.shape[2] == 1 and _can_convolve(kernels, hidden_states, weight, activation):
        x = _side_by_side(hidden_states.transpose(1, 2))
        return kernels.causal_conv(x, states, weight.contiguous(), bias, rows).transpose(1, 2)
    if isinstance(conv_state, HeldStates):
        own = conv_state.gathered()
        y = theirs(hidden_states, own, weight, bias, activation)
        conv_state.put(own)
        return y
    return theirs(hidden_states, conv_state, weight, bias, activation)


def _can_convolve(kernels: StateKernels, x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> bool:
    fits = weight.dtype is x.dtype and x.dtype in kernels.dtypes and activation in ("silu", "swish")
    return fits and not weight.shape[0] % MULTIPLE and weight.shape[1] <= MOST_WIDTH


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [rows, tokens, numbers] with each token contiguous and one stride between all tokens."""
    rows, tokens, _ = x.shape
    are_even = rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if x.stride(2) == 1 and are_even else x.contiguous()
