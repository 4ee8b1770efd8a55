"""`kernels.gated_activation.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.gated_activation.kernel import activate_and_multiply_kernel
from kernels.gated_activation.reference import Activation
from kernels.overlap import overlap
from kernels.row_quantization.launch import WIDE_BLOCK, Rounded
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

BLOCK = 1024
MAX_ROUNDED_WIDTH = 16384
"""Wider rows fit neither into a program's registers twice, nor into the shared memory of every GPU."""


def activate_and_multiply(
    gate_up: torch.Tensor, activation: Activation, rounded: Rounded | None = None
) -> torch.Tensor:
    """Return a(first half) * second half of the last dimension: [rows, 2 * width], contiguous, to [rows, width].

    Args:
        rounded: buffers that receive the result quantized to 8 bits, as in `kernels.row_quantization`; `width` is then
            at most `MAX_ROUNDED_WIDTH`.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    # To compute a row's span, one program needs the whole row.
    block = triton.next_power_of_2(width) if rounded else BLOCK
    if rows:
        activate_and_multiply_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            out,
            *(rounded or (out, out)),
            width,
            ACTIVATION=activation,
            BLOCK=block,
            LIMIT=LIMIT_BY_DTYPE[rounded[0].dtype] if rounded else 0,
            num_warps=16 if block > WIDE_BLOCK else 4,
            **overlap(),
        )
    return out
