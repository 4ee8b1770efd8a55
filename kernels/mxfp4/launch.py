"""A mixture of experts for one or two rows with MXFP4 weights, by `kernels.mxfp4.row_kernel`."""

from __future__ import annotations

import torch
import triton

from kernels.gated_activation.reference import Activation
from kernels.mxfp4.reference import GROUP, Mxfp4Matrix
from kernels.mxfp4.row_kernel import mxfp4_down_kernel, mxfp4_gate_up_kernel
from kernels.overlap import overlap

ROW_GROUPS = 32
"""Maximum groups per tile: one for each thread of a warp."""
GATE_UP_OUTPUTS, DOWN_OUTPUTS = 2, 16
"""Per tile: gate outputs, and outputs over all experts of a row, so that a thread has four per input that it reads."""


def multiply_rows(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Mxfp4Matrix,
    down: Mxfp4Matrix,
    activation: Activation,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Multiply one or two rows, separately, by their `experts`, weighted by `weights`, both [rows, chosen].

    Expert weights are not rounded to the dtype of `x`; that would only change those that float16 cannot represent.
    """
    has_bias, (up_bias, down_bias) = biases is not None, biases or (x, x)
    (rows, hidden), chosen, width = x.shape, experts.shape[1], down.shape[1]
    inner = torch.empty(rows * chosen, width, dtype=x.dtype, device=x.device)
    mxfp4_gate_up_kernel[(rows * chosen, triton.cdiv(width, GATE_UP_OUTPUTS))](
        x.view(torch.int32),
        experts,
        gate_up.held,
        gate_up.units,
        up_bias,
        inner,
        width,
        GROUPS=hidden // GROUP,
        CHOSEN=chosen,
        HAS_BIAS=has_bias,
        ACTIVATION=activation,
        BLOCK_N=GATE_UP_OUTPUTS,
        BLOCK_G=_block_groups(hidden),
        num_warps=1,
        **overlap(),
    )
    out = torch.empty_like(x)
    block_c = triton.next_power_of_2(chosen)
    block_n = max(1, DOWN_OUTPUTS // max(4, block_c))
    mxfp4_down_kernel[(rows, triton.cdiv(hidden, block_n))](
        inner.view(torch.int32),
        experts,
        weights,
        down.held,
        down.units,
        down_bias,
        out,
        hidden,
        GROUPS=width // GROUP,
        CHOSEN=chosen,
        HAS_BIAS=has_bias,
        BLOCK_C=block_c,
        BLOCK_N=block_n,
        BLOCK_G=_block_groups(width),
        num_warps=4,
        **overlap(),
    )
    return out


def _block_groups(depth: int) -> int:
    return int(min(ROW_GROUPS, triton.next_power_of_2(depth // GROUP)))
