"""`kernels.row_quantization.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.overlap import overlap
from kernels.row_quantization.kernel import quantize_rows_kernel
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

WIDE_BLOCK = 8192
"""Wider rows take more warps, or they would not fit into registers."""

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Quantized rows in one byte per element, and their spans, float32 [rows]."""


def empty_rounded(x: torch.Tensor, dtype: torch.dtype) -> Rounded:
    """Return uninitialized buffers for the rows of `x` [rows, width] quantized to `dtype`."""
    held = torch.empty(x.shape, dtype=dtype, device=x.device)
    return held, torch.empty(len(x), dtype=torch.float32, device=x.device)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> Rounded:
    """Quantize `x` [rows, width], contiguous; return (held, spans): [rows, width] in `dtype`, and float32 [rows]."""
    rows, width = x.shape
    out, spans = empty_rounded(x, dtype)
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
