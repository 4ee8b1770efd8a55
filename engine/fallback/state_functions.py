"""Functions that replace those of transformers in layers that keep states, by our kernels.

Each takes the original (`theirs`) first, then its arguments. It calls the original for what the kernels do not support:
other widths, other dtypes, texts packed into one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from engine.backend import StateKernels
from engine.fallback.spec import StateKind
from engine.fallback.state_caches import HeldStates
from kernels.state_rows import StateRows

State = torch.Tensor | HeldStates
"""As a module gets it from its cache, which it passes on without looking at it."""

MULTIPLE, MOST_KEYS, MOST_WIDTH = 16, 256, 8
"""What kernels of all devices support: the divisor of widths, the widest key or state, and the widest convolution."""
KIND_BY_FUNCTION: dict[str, StateKind] = {
    "torch_recurrent_gated_delta_rule": "recurrent",
    "mamba2_selective_state_update": "recurrent",
    "causal_conv1d_update": "conv",
}
"""Functions for rows of one token, and which of a module's states they take as they are held."""


def state_functions(kernels: StateKernels) -> dict[str, Callable[..., Any]]:
    """Return functions by the names that they replace in Qwen3.5, Granite 4, LFM2 and others with such layers."""
    return {
        "torch_chunk_gated_delta_rule": partial(_gated_delta, kernels),
        "torch_recurrent_gated_delta_rule": partial(_gated_delta, kernels),
        "causal_conv1d_fn": partial(_causal_conv, kernels),
        "causal_conv1d_update": partial(_causal_conv_update, kernels),
        "mamba2_chunk_scan": partial(_chunk_scan, kernels),
        "mamba2_selective_state_update": partial(_state_update, kernels),
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
    is_plain = all(switches.values()) and _are_defaults(told)
    if states is None or not (is_plain and _can_keep(kernels, states, key.shape[3], (query, key, value))):
        state = initial_state.gathered() if isinstance(initial_state, HeldStates) else initial_state
        found: tuple[torch.Tensor, torch.Tensor] = theirs(
            query, key, value, g=g, beta=beta, initial_state=state, **switches, **told
        )
        return found
    query, key, value = map(_heads_side_by_side, (query, key, value))
    out = kernels.gated_delta(query, key, value, g.float().contiguous(), beta.float().contiguous(), states, rows)
    return out, initial_state


def _chunk_scan(
    kernels: StateKernels,
    theirs: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **told: Any,
) -> Any:
    """Return the outputs [rows, tokens, heads, head_dim] and the states, which the kernel updates in place."""
    is_plain, parts = return_final_states and _are_defaults(told), (hidden_states, B, C)
    if initial_states is None or not (is_plain and _can_keep(kernels, initial_states, B.shape[3], parts)):
        options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": return_final_states}
        return theirs(
            *(hidden_states, dt, A, B, C, chunk_size),
            **{"D": D, "dt_bias": dt_bias, "initial_states": initial_states, **options, **told},
        )
    steps = _steps(dt, dt_bias, is_softplus=dt_softplus).clamp(*dt_limit)
    return _scanned(kernels, parts, (steps, A, D), initial_states), initial_states


def _state_update(
    kernels: StateKernels,
    theirs: Callable[..., torch.Tensor],
    state: State,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **told: Any,
) -> torch.Tensor:
    """Return the outputs [rows, heads, head_dim] of rows of one token; `state` is updated in place.

    As theirs, it gets what a head has one number of once for each output: `dt` [rows, heads, head_dim], `A` [heads,
    head_dim, state_dim], `D` and `dt_bias` [heads, head_dim].
    """
    states, rows = state if isinstance(state, HeldStates) else (state, None)
    parts = hidden_states.unsqueeze(1), B.unsqueeze(1), C.unsqueeze(1)
    if not (_are_defaults(told) and _can_keep(kernels, states, B.shape[2], parts)):
        with _copied(state) as own:
            return theirs(own, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **told)
    steps = _steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], is_softplus=dt_softplus)
    numbers = steps.unsqueeze(1), A[:, 0, 0], None if D is None else D[:, 0]
    y = _scanned(kernels, parts, numbers, states, rows).squeeze(1)
    return y if z is None else y * functional.silu(z)


def _scanned(
    kernels: StateKernels,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    """Scan `parts` x, b and c with the steps, a and d that `numbers` are."""
    x, b, c = map(_heads_side_by_side, parts)
    steps, a, d = (None if part is None else part.float().contiguous() for part in numbers)
    assert steps is not None
    assert a is not None
    return kernels.selective_scan(x, steps, a, b, c, d, states, rows)


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, *, is_softplus: bool) -> torch.Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return functional.softplus(dt) if is_softplus else dt


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
    if not (_are_defaults(told) and _can_convolve(kernels, hidden_states, weight, activation)):
        return theirs(hidden_states, weight, bias, activation=activation, **told)
    x = _side_by_side(hidden_states.transpose(1, 2))
    y = kernels.causal_conv(x, None, weight.contiguous(), bias, is_activated=activation is not None)
    return y.transpose(1, 2)


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
        is_activated = activation is not None
        y = kernels.causal_conv(x, states, weight.contiguous(), bias, rows, is_activated=is_activated)
        return y.transpose(1, 2)
    with _copied(conv_state) as own:
        return theirs(hidden_states, own, weight, bias, activation)


@contextmanager
def _copied(state: State) -> Iterator[torch.Tensor]:
    """Give a copy of what is held, and put back what becomes of it; a tensor is given as it is."""
    if isinstance(state, HeldStates):
        own = state.gathered()
        yield own
        state.put(own)
    else:
        yield state


def _are_defaults(told: Mapping[str, Any]) -> bool:
    return all(argument is None for argument in told.values())


def _can_keep(kernels: StateKernels, states: torch.Tensor, width: int, parts: Sequence[torch.Tensor]) -> bool:
    """Tell whether the kernels know states and inputs [..., dim] like these; `width` is that of keys."""
    dtypes = {part.dtype for part in parts}
    return (
        states.dtype is torch.float32
        and states.is_contiguous()
        and len(dtypes) == 1
        and dtypes <= kernels.dtypes
        and not any(part.shape[-1] % MULTIPLE for part in parts)
        and width <= MOST_KEYS
    )


def _can_convolve(kernels: StateKernels, x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> bool:
    fits = weight.dtype is x.dtype and x.dtype in kernels.dtypes and activation in (None, "silu", "swish")
    return fits and not weight.shape[0] % MULTIPLE and weight.shape[1] <= MOST_WIDTH


def _heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [rows, tokens, heads, dim] with each token contiguous and one stride between all tokens."""
    return _side_by_side(x.flatten(2)).view(x.shape)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [rows, tokens, numbers] with each token contiguous and one stride between all tokens."""
    rows, tokens, _ = x.shape
    are_even = rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if x.stride(2) == 1 and are_even else x.contiguous()
