"""`kernels.lora_logits.reference` on a GPU, for whole batches of adapters addressed by tables on the device."""

from __future__ import annotations

import torch
import triton

from kernels.lora_logits.kernel import lora_logits_kernel
from kernels.lora_shrink.launch import TILE, Tiles

BLOCK_N, BLOCK_K = 64, 128


def lora_logits(x: torch.Tensor, logits: torch.Tensor, tiles: Tiles, *, entry: int) -> None:
    """Overwrite the logits of segments whose adapters have their own output matrix; others stay.

    Args:
        x: [rows, hidden], contiguous.
        logits: [rows, vocab] float32, contiguous.
        tiles, entry: as in `kernels.lora_shrink.launch`, with rows as tokens; the address in the place of B is that of
            the output matrix [vocab, hidden].
    """
    depth, width = x.shape[1], logits.shape[1]
    lora_logits_kernel[(tiles.most, triton.cdiv(width, BLOCK_N))](
        x,
        tiles.numbers,
        tiles.count,
        logits,
        width,
        depth,
        entry,
        BLOCK_M=TILE,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K if x.element_size() == 2 else BLOCK_K // 2,
        num_warps=4,
        num_stages=3 if x.element_size() == 2 else 2,
    )
