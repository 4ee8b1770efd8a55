"""`kernels.lora_logits.reference` on a GPU, for whole batches of adapters that lie where a table on the device says."""

from __future__ import annotations

import torch
import triton

from kernels.lora_logits.kernel import lora_logits_kernel
from kernels.search import num_tiles

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 128


def lora_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    segments: torch.Tensor,
    count: torch.Tensor,
    *,
    entry: int,
    max_segments: int,
) -> None:
    """Write the logits of segments whose adapters have a matrix of their own; the others stay.

    Args:
        x: [rows, hidden], contiguous.
        logits: [rows, vocab] float32, contiguous.
        segments, count, entry, max_segments: as in `kernels.lora_shrink.launch`, of rows; the address in the place of B
            is that of a matrix [vocab, hidden].
    """
    (rows, depth), width = x.shape, logits.shape[1]
    lora_logits_kernel[(num_tiles(rows, max_segments, BLOCK_M), triton.cdiv(width, BLOCK_N))](
        x,
        segments,
        count,
        logits,
        width,
        depth,
        entry,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K if x.element_size() == 2 else BLOCK_K // 2,
        num_warps=4,
        num_stages=3 if x.element_size() == 2 else 2,
    )
