"""GPU kernel for the LoRA expand: low-rank activations times B, added to the output in place."""

import triton
import triton.language as tl

from kernels.lora_shrink.kernel import matrix_of, row_length, tile_at
from kernels.overlap import let_begin, wait

SPLITS_AT_ONCE = tl.constexpr(8)
"""Parts of a token's activations that are in flight; with more, registers spill."""


@triton.jit(do_not_specialize=["num_tokens", "entry", "num_modules"])
def lora_expand_kernel(
    shrunk,
    tiles,
    count,
    y,
    num_tokens,
    y_width,
    entry,
    num_modules,
    room,
    out_0,
    out_1,
    out_2,
    TYPE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (columns of a module, tile) adds to `y`, with row stride `y_width` and the modules side by side.

    Tiles and `shrunk` are those of `kernels.lora_shrink.kernel`; B is of TYPE, with rows padded to `row_length`; out_i
    is module i's width, 0 for none. If an adapter has gains and shifts, float32 [2, out_i], y becomes y * gain + shift
    before the sum. BLOCK_SPLITS is a power of two and at least NUM_SPLITS. Early loads and waits follow
    `kernels.lora_shrink.kernel`.
    """
    let_begin(OVERLAPS)
    part, tile = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.load(count)
    start, end, table = tile_at(tiles, tile)
    if tile >= num_tiles:
        wait(OVERLAPS)
        return
    # Each module has as many programs as it needs, one module after the other.
    first_1 = tl.cdiv(out_0, BLOCK_N)
    first_2 = first_1 + tl.cdiv(out_1, BLOCK_N)
    module = (part >= first_1).to(tl.int32) + (part >= first_2).to(tl.int32)
    out = tl.where(module == 0, out_0, tl.where(module == 1, out_1, out_2))
    column = tl.where(module == 0, 0, tl.where(module == 1, out_0, out_0 + out_1))
    part -= tl.where(module == 0, 0, tl.where(module == 1, first_1, first_2))
    rank = matrix_of(table, entry + module, 2).to(tl.int32)
    columns = matrix_of(table, entry + module, 3)
    b = tl.multiple_of(matrix_of(table, entry + module, 1).to(tl.pointer_type(TYPE)), 16)
    if (rank == 0) & (columns == 0):
        wait(OVERLAPS)
        return
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column, length = n < out, row_length(rank)
    is_changed = is_column & (columns != 0)
    gains = columns.to(tl.pointer_type(tl.float32)) + n
    gain = tl.load(gains, mask=is_changed, other=1.0)
    shift = tl.load(gains + out, mask=is_changed, other=0.0)
    source = shrunk + module * room
    if end - start == 1:
        from_token, length_of_split = source + start * num_modules * room, num_tokens * num_modules * room
        total = tl.zeros([BLOCK_N], tl.float32)
        for low in range(0, rank, BLOCK_R):
            r = low + tl.arange(0, BLOCK_R)
            is_number = is_column[:, None] & (r < length)[None, :]
            rows = tl.load(b + n[:, None] * length + r[None, :], mask=is_number, other=0.0)
            wait(OVERLAPS)
            # Each load is so small that the compiler lets every thread load what it needs.
            numbers = tl.zeros([BLOCK_R], tl.float32)
            for before in range(0, NUM_SPLITS, SPLITS_AT_ONCE):
                for split in tl.static_range(min(NUM_SPLITS, SPLITS_AT_ONCE)):
                    is_split = before + split < NUM_SPLITS
                    numbers += tl.load(from_token + (before + split) * length_of_split + r, mask=is_split, other=0.0)
            total += tl.sum(rows.to(tl.float32) * numbers.to(TYPE).to(tl.float32)[None, :], axis=1)
        wait(OVERLAPS)
        to_row = y + start * y_width + column + n
        total += tl.load(to_row, mask=is_column, other=0.0).to(tl.float32) * gain + shift
        tl.store(to_row, total.to(y.dtype.element_ty), mask=is_column)
    else:
        token = start + tl.arange(0, BLOCK_M)
        is_token, split = token < end, tl.arange(0, BLOCK_SPLITS)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for low in range(0, rank, BLOCK_R):
            r = low + tl.arange(0, BLOCK_R)
            is_inside = is_column[None, :] & (r < length)[:, None]
            b_tile = tl.load(b + n[None, :] * length + r[:, None], mask=is_inside, other=0.0)
            wait(OVERLAPS)
            # At once: the compiler would bring each of several into the layout of the product's operand.
            is_number = (split < NUM_SPLITS)[:, None, None] & is_token[None, :, None]
            from_token = source + (split[:, None, None] * num_tokens + token[None, :, None]) * num_modules * room
            h = tl.sum(tl.load(from_token + r[None, None, :], mask=is_number, other=0.0), axis=0)
            product += tl.dot(h.to(b_tile.dtype), b_tile, input_precision="ieee")
        wait(OVERLAPS)
        target = y + token[:, None] * y_width + (column + n)[None, :]
        is_target = is_token[:, None] & is_column[None, :]
        product += tl.load(target, mask=is_target, other=0.0).to(tl.float32) * gain[None, :] + shift[None, :]
        tl.store(target, product.to(y.dtype.element_ty), mask=is_target)
