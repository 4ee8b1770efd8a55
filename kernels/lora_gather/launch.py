"""`kernels.lora_gather.reference` on a GPU for whole batches of adapters, fused with the expand that follows."""

from __future__ import annotations

import torch
import triton

from kernels.lora_gather.kernel import lora_gather_kernel
from kernels.lora_shrink.launch import TILE, Tiles

BLOCK_R, BLOCK_N = 16, 128


def lora_gather(token_ids: torch.Tensor, x: torch.Tensor, tiles: Tiles, *, own: int, entry: int) -> None:
    """Apply embedding adapters in place to `x` [tokens, hidden], the embedded `token_ids` [tokens] int64.

    Rows of a segment whose adapter replaces the embedding are taken from that matrix; low-rank products are added. Rows
    of other segments stay. `x` and `token_ids` are contiguous.

    Args:
        own: the table entry of a replacement for the base's embedding, [vocab, hidden], its address in the place of A.
        entry: the table entry of the product, with an A [vocab, rank] laid out like B, and of column gains and shifts.
    """
    width = x.shape[1]
    block_n = BLOCK_N if x.element_size() == 2 else BLOCK_N // 4
    lora_gather_kernel[(tiles.most, triton.cdiv(width, block_n))](
        token_ids,
        tiles.numbers,
        tiles.count,
        x,
        width,
        own,
        entry,
        BLOCK_M=TILE,
        BLOCK_R=BLOCK_R,
        BLOCK_N=block_n,
        num_warps=4,
    )
