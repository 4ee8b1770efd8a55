"""`kernels.add_rms_norm.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.add_rms_norm.kernel import add_rms_norm_kernel
from kernels.overlap import overlap
from kernels.row_quantization.launch import Rounded
from kernels.row_quantization.reference import LIMIT_BY_DTYPE


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rounded: Rounded | None = None,
) -> torch.Tensor:
    """Add `delta` to `x` in place and return the norm of the sum. Arguments as in the reference, contiguous.

    Args:
        rounded: buffers that receive the normed rows quantized to 8 bits, as in `kernels.row_quantization`.
    """
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            *(rounded or (out, out)),
            width,
            eps,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            LIMIT=LIMIT_BY_DTYPE[rounded[0].dtype] if rounded else 0,
            num_warps=min(16, max(1, block // 512)),
            **overlap(),
        )
    return out
