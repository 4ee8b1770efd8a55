"""`kernels.row_quantization.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.overlap import overlap
from kernels.row_quantization.kernel import quantize_rows_kernel
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

WIDE_BLOCK = 8192
"""From here on a row takes more warps, or its numbers would not fit into their registers."""


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (held, spans) of `x` [rows, width], contiguous: [rows, width] in `dtype`, and float32 [rows]."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    spans = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        quantize_rows_kernel[(rows,)](
            x,
            out,
            spans,
            width,
            LIMIT=LIMIT_BY_DTYPE[dtype],
            BLOCK=block,
            num_warps=16 if block > WIDE_BLOCK else 4,
            **overlap(),
        )
    return out, spans
