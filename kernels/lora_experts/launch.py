"""`kernels.lora_experts.reference` on a GPU: for all experts of a layer, with adapters addressed by device tables."""

from __future__ import annotations

import torch
import triton

from kernels.architecture import PROGRAMS_WANTED
from kernels.experts.routing import Routing
from kernels.lora_experts.kernel import expert_expand_kernel, expert_shrink_kernel, row_tables_kernel
from kernels.lora_shrink.launch import BLOCK_R, TILE, Tiles
from kernels.overlap import overlap

BLOCK_N = 64
"""Outputs per tile."""
MAX_SPLITS = 16
"""The expand kernel sums this many partial products at most."""
Tables = torch.Tensor
"""int64 [rows]: for each row the device address of its adapter's expert table [entries, 4] int64, 0 for none."""


def fill_row_tables(tables: Tables, tiles: Tiles, *, entry: int) -> None:
    """Fill `tables` for all rows of a step with the addresses of their adapters' expert tables.

    Args:
        entry: the entry of an adapter's table that holds the number of entries before those of experts, 0 for no
            experts.
    """
    tables.zero_()
    if tiles.most:
        row_tables_kernel[(tiles.most,)](
            tiles.numbers, tiles.count, tables, entry, BLOCK_M=TILE, num_warps=1, **overlap()
        )


def expert_shrink(
    x: torch.Tensor, routing: Routing, tables: Tables, *, entry: int, products: int, max_rank: int, height: int
) -> torch.Tensor:
    """Multiply each pair's row by its adapter's A for the pair's expert.

    Args:
        x: [rows, in], or [pairs, in]; contiguous.
        routing: with tiles of `height` pairs.
        entry: the entry of the layer's first expert and the first of the products.
        products: number of adjacent products that share the input.
        max_rank: the highest rank of any adapter.

    Returns:
        [splits, pairs, products, room] float32; the product is the sum over splits. Undefined for pairs whose adapter
        has no such product, and past the last block of a rank.
    """
    assert routing.slots is not None
    assert routing.tiles is not None
    pairs, chosen, width = routing.experts.numel(), routing.experts.shape[1], x.shape[1]
    is_short = x.element_size() == 2
    block_k = (128 if height <= 32 else 64) if is_short else 32
    splits = _num_splits(pairs, len(routing.slots), products, triton.cdiv(width, block_k))
    room = triton.cdiv(max_rank, BLOCK_R) * BLOCK_R
    shrunk = torch.empty(splits, pairs, products, room, dtype=torch.float32, device=x.device)
    expert_shrink_kernel[(splits, products, len(routing.tiles))](
        x,
        routing.slots,
        routing.tiles,
        routing.num_tiles,
        tables,
        shrunk,
        pairs,
        width,
        entry,
        pairs // len(x),
        chosen,
        room,
        products,
        splits,
        BLOCK_M=height,
        BLOCK_R=BLOCK_R,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3 if is_short else 2,
        **overlap(),
    )
    return shrunk


def expert_expand(
    y: torch.Tensor, shrunk: torch.Tensor, routing: Routing, tables: Tables, *, entry: int, height: int
) -> None:
    """Add the products with B in place to `y` [pairs, out], contiguous; other arguments as in `expert_shrink`."""
    assert routing.tiles is not None
    splits, pairs, products, room = shrunk.shape
    width = y.shape[1]
    block_n = BLOCK_N if y.element_size() == 2 else BLOCK_N // 2
    expert_expand_kernel[(triton.cdiv(width, block_n), len(routing.tiles))](
        shrunk,
        routing.slots,
        routing.tiles,
        routing.num_tiles,
        tables,
        y,
        pairs,
        width,
        entry,
        routing.experts.shape[1],
        room,
        splits,
        NUM_PRODUCTS=products,
        BLOCK_M=height,
        BLOCK_R=BLOCK_R,
        BLOCK_N=block_n,
        num_warps=_num_warps(height * y.element_size(), products),
        num_stages=1,
        **overlap(),
    )


def _num_warps(column_bytes: int, products: int) -> int:
    """Return the number of warps with which an expand does not spill registers.

    Found by compiling with Triton 3.6 and 3.7 for four targets: some tiles spill with four warps, others with eight.
    """
    return 4 if column_bytes <= 32 or (products == 1 and column_bytes == 128) else 8


def _num_splits(pairs: int, experts: int, products: int, most: int) -> int:
    """Return how many programs split the depth: more for few pairs, because many fill the device by themselves."""
    return max(1, min(most, MAX_SPLITS, PROGRAMS_WANTED // (min(pairs, experts) * products)))
