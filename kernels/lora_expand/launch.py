"""`kernels.lora_expand.reference` on a GPU, for whole batches of adapters addressed by tables on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.lora_expand.kernel import lora_expand_kernel
from kernels.lora_shrink.launch import BLOCK_R, TILE, Tiles
from kernels.overlap import overlap

BLOCK_N = 256
TYPE_BY_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def lora_expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    tiles: Tiles,
    *,
    entry: int,
    splits: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Add the products with B in place to `y` [tokens, sum of splits], whose row stride may be larger.

    If an adapter's table has an address of gains and shifts [2, out], `y` becomes y * gain + shift before that.

    Args:
        shrunk, tiles, entry: as in `kernels.lora_shrink.launch`.
        splits: output widths of the modules, side by side in `y`; at most three.
        dtype: of B; None for that of `y`.
    """
    num_parts, tokens, num_modules, room = shrunk.shape
    widths = [*splits, 0, 0][:3]
    dtype = dtype or y.dtype
    block_n = BLOCK_N if dtype.itemsize == 2 else BLOCK_N // 4
    lora_expand_kernel[(sum(triton.cdiv(split, block_n) for split in splits), tiles.most)](
        shrunk,
        tiles.numbers,
        tiles.count,
        y,
        tokens,
        y.stride(0),
        entry,
        num_modules,
        room,
        widths[0],
        widths[1],
        widths[2],
        TYPE=TYPE_BY_DTYPE[dtype],
        NUM_SPLITS=num_parts,
        BLOCK_M=TILE,
        BLOCK_R=BLOCK_R,
        BLOCK_N=block_n,
        BLOCK_SPLITS=triton.next_power_of_2(num_parts),
        num_warps=4,
        # With more, the compiler would copy what the shrink writes before it waits (`loadtest.gpu.early_touches`).
        num_stages=1,
        **overlap(),
    )
