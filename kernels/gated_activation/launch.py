"""`kernels.gated_activation.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.gated_activation.kernel import silu_and_multiply_kernel
from kernels.overlap import overlap

BLOCK = 1024


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension: [rows, 2 * width], contiguous, to [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_and_multiply_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate_up, out, width, BLOCK=BLOCK, num_warps=4, **overlap()
        )
    return out
