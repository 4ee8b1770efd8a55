"""`kernels.embedding.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.embedding.kernel import put_drawn_kernel, take_rows_kernel
from kernels.overlap import overlap

MAX_BLOCK, TOKEN_BLOCK = 2048, 128


def take_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows [len(indices), ...] of `x`, contiguous; `indices` are int64 and in range."""
    out = torch.empty(len(indices), *x.shape[1:], dtype=x.dtype, device=x.device)
    if out.numel():
        width = out[0].numel()
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        grid = len(indices), triton.cdiv(width, block)
        take_rows_kernel[grid](x, indices, out, WIDTH=width, BLOCK=block, num_warps=4, **overlap())
    return out


def put_drawn(token_ids: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor, pending: int) -> None:
    """Replace pending ids by the tokens sampled on the device, in place. Arguments as in the reference."""
    if len(token_ids):
        grid = (triton.cdiv(len(token_ids), TOKEN_BLOCK),)
        put_drawn_kernel[grid](
            token_ids, rows, drawn, len(token_ids), pending, BLOCK=TOKEN_BLOCK, num_warps=4, **overlap()
        )
