"""GPU kernels for LoRA of experts, on the tiles of pairs of one expert that `kernels.experts.routing_kernel` makes.

A program finds the adapters of its tile's rows and multiplies by each one for all of its rows in the tile at once. In
prefill a tile has mostly one or two adapters; in decode each row may have its own, but few rows share an expert.

    table of an adapter's experts    [layer, expert, product] of (address of A, address of B, rank, outputs)

A is [rank, in]; rows of B are padded to `kernels.lora_shrink.kernel.row_length`. The products are: gate, or gate and up
together; up; down. A rank of 0 means no product.
"""

import triton
import triton.language as tl

from kernels.lora_shrink.kernel import matrix_of, row_length, tile_at
from kernels.overlap import take_turn

PRODUCTS = tl.constexpr(3)


@triton.jit(do_not_specialize=["entry"])
def row_tables_kernel(tiles, count, tables, entry, BLOCK_M: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program i writes the address of the adapter's expert table for each row of tile i, 0 for none.

    Tiles are those of `kernels.lora_shrink.kernel`. The first number of `entry` in the adapter's table is the number of
    entries before those of experts, 0 if the adapter has none.
    """
    take_turn(OVERLAPS)
    tile = tl.program_id(0)
    if tile >= tl.load(count):
        return
    start, end, table = tile_at(tiles, tile)
    before = matrix_of(table, entry, 0)
    address = tl.where(before > 0, table.to(tl.int64) + before * 32, 0)
    row = start + tl.arange(0, BLOCK_M)
    tl.store(tables + row, tl.zeros_like(row) + address, mask=row < end)


@triton.jit
def _pairs_of(slots, first, end, tables, chosen, BLOCK_M: tl.constexpr):
    """Return the pairs of a tile and the addresses of their rows' tables, 0 if there is no pair or no table."""
    slot = first + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot, mask=slot < end, other=0)
    return pair, tl.load(tables + pair // chosen, mask=slot < end, other=0)


@triton.jit(do_not_specialize=["num_pairs", "entry", "sharers", "chosen", "num_products", "num_splits"])
def expert_shrink_kernel(
    x,
    slots,
    tiles,
    num_tiles,
    tables,
    shrunk,
    num_pairs,
    width,
    entry,
    sharers,
    chosen,
    room,
    num_products,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (split of the depth, product, tile) writes float32 [num_splits, pairs, num_products, room].

    Pair p reads row p // sharers of `x` [any, width], and its adapter is that of row p // chosen in `tables`. `entry`
    is the entry of the layer's first expert and first product. Each rank is padded with zeros to a multiple of BLOCK_R,
    which divides `room`. The consumer sums the splits, in fixed order.
    """
    take_turn(OVERLAPS)
    split, product, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, first, end = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tile >= tl.load(num_tiles):
        return
    pair, left = _pairs_of(slots, first, end, tables, chosen, BLOCK_M)
    row = (pair // sharers).to(tl.int64)
    target = shrunk + ((split * num_pairs + pair).to(tl.int64) * num_products + product) * room
    share = tl.cdiv(tl.cdiv(width, BLOCK_K), num_splits) * BLOCK_K
    begun, last = split * share, tl.minimum(width, (split + 1) * share)
    own = tl.max(left, axis=0)
    while own != 0:
        is_own = left == own
        table, at_expert = own.to(tl.pointer_type(tl.int64)), entry + expert * PRODUCTS + product
        rank = matrix_of(table, at_expert, 2)
        a = tl.multiple_of(matrix_of(table, at_expert, 0).to(tl.pointer_type(x.dtype.element_ty)), 16)
        for low in range(0, rank, BLOCK_R):
            r = low + tl.arange(0, BLOCK_R)
            sums = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
            for at in range(begun, last, BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                is_depth = (k < last)[None, :]
                a_tile = tl.load(a + r[:, None] * width + k[None, :], mask=(r < rank)[:, None] & is_depth, other=0.0)
                x_tile = tl.load(x + row[:, None] * width + k[None, :], mask=is_own[:, None] & is_depth, other=0.0)
                sums = tl.dot(a_tile, tl.trans(x_tile), sums, input_precision="ieee")
            tl.store(target[None, :] + r[:, None], sums, mask=is_own[None, :])
        left = tl.where(is_own, 0, left)
        own = tl.max(left, axis=0)


@triton.jit(do_not_specialize=["num_pairs", "entry", "chosen", "num_splits"])
def expert_expand_kernel(
    shrunk,
    slots,
    tiles,
    num_tiles,
    tables,
    y,
    num_pairs,
    width,
    entry,
    chosen,
    room,
    num_splits,
    NUM_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (columns, tile) adds the products with the tile's expert's B to `y` [pairs, width].

    `shrunk` is the result of `expert_shrink_kernel`; B has the type of `y`. A second product is added from the middle
    column of `y` on.
    """
    take_turn(OVERLAPS)
    begun, tile = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    expert, first, end = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tile >= tl.load(num_tiles):
        return
    dtype = y.dtype.element_ty
    pair, left = _pairs_of(slots, first, end, tables, chosen, BLOCK_M)
    column = begun + tl.arange(0, BLOCK_N)
    own = tl.max(left, axis=0)
    while own != 0:
        is_own = left == own
        table = own.to(tl.pointer_type(tl.int64))
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for product in tl.static_range(NUM_PRODUCTS):
            at_expert = entry + expert * PRODUCTS + product
            rank, out = matrix_of(table, at_expert, 2), matrix_of(table, at_expert, 3)
            b = tl.multiple_of(matrix_of(table, at_expert, 1).to(tl.pointer_type(dtype)), 16)
            n = column - product * (width // 2)
            is_column, length = (n >= 0) & (n < out), row_length(rank)
            # A product without columns in this block is skipped.
            has_any = (begun + BLOCK_N > product * (width // 2)) & (begun < product * (width // 2) + out)
            for low in range(0, tl.where(has_any, rank, 0), BLOCK_R):
                r = low + tl.arange(0, BLOCK_R)
                is_inside = is_column[None, :] & (r < length)[:, None]
                b_tile = tl.load(b + n[None, :] * length + r[:, None], mask=is_inside, other=0.0)
                h = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for split in range(num_splits):
                    source = shrunk + ((split * num_pairs + pair).to(tl.int64) * NUM_PRODUCTS + product) * room
                    h += tl.load(source[:, None] + r[None, :], mask=is_own[:, None], other=0.0)
                total = tl.dot(h.to(dtype), b_tile, total, input_precision="ieee")
        place = y + pair.to(tl.int64)[:, None] * width + column[None, :]
        is_place = is_own[:, None] & (column < width)[None, :]
        total += tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, total.to(dtype), mask=is_place)
        left = tl.where(is_own, 0, left)
        own = tl.max(left, axis=0)
