"""GPU kernel for the LoRA shrink: tiles of tokens of one adapter, each adapter with its own rank."""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait

ROW_STEP = tl.constexpr(8)
"""Rows of B are padded with zeros to a multiple of this: the widest load takes as many 16-bit elements."""


@triton.jit
def row_length(rank):
    """Return the row stride of a padded matrix with rows of `rank` elements."""
    return tl.cdiv(rank, ROW_STEP) * ROW_STEP


@triton.jit
def tile_at(tiles, tile):
    """Return a tile's first token, its end and its adapter's table; undefined for a tile past the last.

    These are loaded before it is known whether the tile exists, which saves a round trip to memory.
    """
    at = tiles + tile * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.pointer_type(tl.int64))


@triton.jit
def matrix_of(table, entry, part: tl.constexpr):
    """Return one part of the module `entry` in an adapter's table.

    Part 0 is the address of A, 1 that of B, 2 the rank, 3 the address of column gains and shifts, 0 for none.
    """
    return tl.load(table + entry * 4 + part)


@triton.jit(do_not_specialize=["num_tokens", "entry", "num_modules"])
def lora_shrink_kernel(
    x,
    tiles,
    count,
    shrunk,
    num_tokens,
    width,
    entry,
    num_modules,
    room,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (split of the depth, module, tile) writes float32 [splits, tokens, modules, room].

    Ranks are padded with zeros to a multiple of BLOCK_R, so that the consumer needs no mask. The consumer also sums the
    splits, in fixed order: a sum by atomics would depend on the order of arrival. Tiles are [first token, end, address
    of a table], int64; their number `count` is on the device. A tile of one token is a matrix-vector product with
    BLOCK_K elements of each row of A in flight. A larger tile cuts each STEP of the depth into PARTS matrix products
    that run side by side, so that none waits for another.

    Adapter weights are loaded while the preceding kernel is finishing. Programs without work wait too: once all
    programs have ended, the next kernel assumes that everything before this one is done.
    """
    let_begin(OVERLAPS)
    split, module, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tiles = tl.load(count)
    start, end, table = tile_at(tiles, tile)
    if tile >= num_tiles:
        wait(OVERLAPS)
        return
    rank = matrix_of(table, entry + module, 2)
    a = tl.multiple_of(matrix_of(table, entry + module, 0).to(tl.pointer_type(x.dtype.element_ty)), 16)
    share = tl.cdiv(tl.cdiv(width, BLOCK_K), NUM_SPLITS) * BLOCK_K
    first, last = split * share, tl.minimum(width, (split + 1) * share)
    target = shrunk + (split * num_tokens * num_modules + module) * room
    if end - start == 1:
        for low in range(0, rank, BLOCK_R):
            r = low + tl.arange(0, BLOCK_R)
            is_rank = r < rank
            total = tl.zeros([BLOCK_R], tl.float32)
            for at in range(first, last, BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                is_depth = k < last
                is_number = is_rank[:, None] & is_depth[None, :]
                rows = tl.load(a + r[:, None] * width + k[None, :], mask=is_number, other=0.0)
                wait(OVERLAPS)
                numbers = tl.load(x + start * width + k, mask=is_depth, other=0.0)
                total += tl.sum(rows.to(tl.float32) * numbers.to(tl.float32)[None, :], axis=1)
            wait(OVERLAPS)
            tl.store(target + start * num_modules * room + r, total)
        wait(OVERLAPS)
    else:
        wait(OVERLAPS)
        token = start + tl.arange(0, BLOCK_M)
        is_token = token < end
        lanes = tl.arange(0, PARTS)[:, None] * (STEP // PARTS) + tl.arange(0, STEP // PARTS)[None, :]
        for low in range(0, rank, BLOCK_R):
            r = low + tl.arange(0, BLOCK_R)
            is_rank = r < rank
            sums = tl.zeros([PARTS, BLOCK_M, BLOCK_R], tl.float32)
            for at in range(first, last, STEP):
                k = at + lanes
                is_depth = k < last
                x_tile = tl.load(
                    x + token[None, :, None] * width + k[:, None, :],
                    mask=is_token[None, :, None] & is_depth[:, None, :],
                    other=0.0,
                )
                a_tile = tl.load(
                    a + r[None, None, :] * width + k[:, :, None],
                    mask=is_rank[None, None, :] & is_depth[:, :, None],
                    other=0.0,
                )
                sums += tl.dot(x_tile, a_tile, input_precision="ieee")
            product = tl.sum(sums, axis=0)
            tl.store(target + token[:, None] * num_modules * room + r[None, :], product, mask=is_token[:, None])
