"""`kernels.causal_conv.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.causal_conv.kernel import causal_conv_kernel, causal_conv_step_kernel
from kernels.overlap import overlap
from kernels.state_rows import StateRows, token_stride

TOKENS, CHANNELS = 32, 64
"""Of a program, for rows of many tokens."""
STEP_CHANNELS = 256
"""Of a program, for rows of one token."""


def causal_conv(
    x: torch.Tensor,
    states: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: StateRows | None = None,
    *,
    is_activated: bool = True,
) -> torch.Tensor:
    """Return y [rows, tokens, channels], contiguous, in the dtype of `x`, and update the states in place.

    Args:
        x: shaped like y; one stride between all tokens, which are contiguous.
        states: [rows, channels, width] of the dtype of `x`, contiguous, only for one token; None for zeros that are not
            kept.
        weight: [channels, width], contiguous.
        bias: [channels]; None for none.
        rows: which of `states`, then [any, channels, width], are the rows'.
        is_activated: whether SiLU follows.
    """
    num_rows, tokens, channels = x.shape
    width = weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = {"WIDTH": width, "HAS_BIAS": bias is not None, "HAS_SILU": is_activated, "num_warps": 4, **overlap()}
    if states is None:
        causal_conv_kernel[(triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, TOKENS), num_rows)](
            *(x, weight, weight if bias is None else bias, y, tokens, channels, token_stride(x)),
            BLOCK_T=TOKENS,
            BLOCK_C=CHANNELS,
            **options,
        )
        return y
    assert tokens == 1, "states are those of rows of one token"
    causal_conv_step_kernel[(triton.cdiv(channels, STEP_CHANNELS), num_rows)](
        *(x, states, *(rows or (weight, weight)), weight, weight if bias is None else bias, y),
        *(channels, token_stride(x)),
        IS_HELD=rows is not None,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_C=STEP_CHANNELS,
        **options,
    )
    return y
