"""`kernels.add_rms_norm.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.add_rms_norm.kernel import add_rms_norm_kernel
from kernels.overlap import overlap


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `x` in place and return the norm of the sum; arguments as the reference's, contiguous."""
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            width,
            eps,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(),
        )
    return out
