"""`kernels.lora_gather.reference` on a GPU, for whole batches of adapters, and what the gathered rows are for."""

from __future__ import annotations

import torch
import triton

from kernels.lora_gather.kernel import lora_gather_kernel
from kernels.lora_shrink.launch import TILE

BLOCK_R, BLOCK_N = 16, 128


def lora_gather(
    token_ids: torch.Tensor,
    x: torch.Tensor,
    tiles: torch.Tensor,
    count: torch.Tensor,
    *,
    own: int,
    entry: int,
    max_tiles: int,
) -> None:
    """Make rows of `x` [tokens, hidden], the embedded `token_ids` [tokens] int64, what adapters embed them as.

    Those of a segment whose adapter has an embedding of its own are picked from it; products are added. Both are
    contiguous, and rows of other segments stay.

    Args:
        tiles, count, max_tiles: as in `kernels.lora_shrink.launch`.
        own: the place in the tables of an embedding in place of the base's, [vocab, hidden] where an A is.
        entry: that of the product, whose A is [vocab, rank], laid out as B is; with gains and shifts of columns.
    """
    width = x.shape[1]
    block_n = BLOCK_N if x.element_size() == 2 else BLOCK_N // 4
    lora_gather_kernel[(max_tiles, triton.cdiv(width, block_n))](
        token_ids,
        tiles,
        count,
        x,
        width,
        own,
        entry,
        BLOCK_M=TILE,
        BLOCK_R=BLOCK_R,
        BLOCK_N=block_n,
        num_warps=4,
    )
