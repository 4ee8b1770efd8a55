"""`kernels.lora_experts.reference` on a GPU: for all experts of a layer, and adapters that lie where tables say."""

from __future__ import annotations

import torch
import triton

from kernels.architecture import PROGRAMS_WANTED
from kernels.experts.launch import Routing
from kernels.lora_experts.kernel import expert_expand_kernel, expert_shrink_kernel, row_tables_kernel
from kernels.lora_shrink.launch import BLOCK_R, TILE
from kernels.overlap import overlap

BLOCK_N = 64
"""Outputs of a tile."""
MAX_SPLITS = 16
"""Whoever adds a product sums as many parts of it."""
Tables = torch.Tensor
"""Of each row the address of a table [entries, 4] int64 of its adapter's experts on the device, 0 for none: int64
[rows]."""


def fill_row_tables(tables: Tables, tiles: torch.Tensor, count: torch.Tensor, *, entry: int, max_tiles: int) -> None:
    """Say of each row which experts its adapter has: a whole step's `tables` are written.

    Args:
        tiles, count, max_tiles: as of `kernels.lora_shrink.launch`.
        entry: where an adapter's table says how many entries come before those of experts, 0 where it has none.
    """
    tables.zero_()
    if max_tiles:
        row_tables_kernel[(max_tiles,)](tiles, count, tables, entry, BLOCK_M=TILE, num_warps=1, **overlap())


def expert_shrink(
    x: torch.Tensor, routing: Routing, tables: Tables, *, entry: int, products: int, max_rank: int, height: int
) -> torch.Tensor:
    """Multiply each pair's row by what its adapter has of its expert.

    Args:
        x: [rows, in], or a row for each pair; contiguous.
        routing: with tiles of `height` pairs.
        entry: of the layer's first expert, in its first product.
        products: so many neighbours share the input.
        max_rank: of any adapter.

    Returns:
        [splits, pairs, products, room] float32, the product being the sum over splits; of pairs whose adapter has
        nothing, and past the last block of a rank, it means nothing.
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
    """Add the products with the B's in place to `y` [pairs, out], contiguous; `shrunk` and others as above."""
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
    """Return by how many warps an expand has registers for its tiles.

    As tried by the compilers of Triton 3.6 and 3.7 for four targets: some spill by four warps, others by eight.
    """
    return 4 if column_bytes <= 32 or (products == 1 and column_bytes == 128) else 8


def _num_splits(pairs: int, experts: int, products: int, most: int) -> int:
    """Return among how many programs the depth is cut: few pairs have an expert each, many fill the device alone."""
    return max(1, min(most, MAX_SPLITS, PROGRAMS_WANTED // (min(pairs, experts) * products)))
