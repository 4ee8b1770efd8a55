"""The GPU's part of adapters in the embedding: rows picked by token, of matrices of their own and of products."""

import triton
import triton.language as tl

from kernels.lora_shrink.kernel import matrix_of, row_length, tile_at


@triton.jit(do_not_specialize=["own", "entry"])
def lora_gather_kernel(
    token_ids,
    tiles,
    count,
    x,
    width,
    own,
    entry,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile, columns) makes embedded tokens [tokens, width] what their adapter makes of them.

    Tiles are those of `kernels.lora_shrink.kernel`. Part 0 of the entry `own` is the address of a matrix
    [vocab, width] whose rows take the place of the base's, 0 for none; parts 0 and 1 of `entry` are those of
    A [vocab, rank], whose rows are picked, and of B [width, rank], rows of both as long as `row_length` says; part 3 is
    that of gains and shifts, float32 [2, width], of the base's rows, 0 for none.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.load(count)
    start, end, table = tile_at(tiles, tile)
    if tile >= num_tiles:
        return
    matrix = matrix_of(table, own, 0)
    rank = matrix_of(table, entry, 2)
    if (matrix == 0) & (rank == 0):
        return
    token = start + tl.arange(0, BLOCK_M)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_column = token < end, n < width
    ids = tl.load(token_ids + token, mask=is_token, other=0)
    target = x + token[:, None] * width + n[None, :]
    is_target = is_token[:, None] & is_column[None, :]
    a = tl.multiple_of(matrix_of(table, entry, 0).to(tl.pointer_type(x.dtype.element_ty)), 16)
    b = tl.multiple_of(matrix_of(table, entry, 1).to(tl.pointer_type(x.dtype.element_ty)), 16)
    length = row_length(rank)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for low in range(0, rank, BLOCK_R):
        r = low + tl.arange(0, BLOCK_R)
        is_rank = r < length
        h = tl.load(a + ids[:, None] * length + r[None, :], mask=is_token[:, None] & is_rank[None, :], other=0.0)
        b_tile = tl.load(b + n[None, :] * length + r[:, None], mask=is_column[None, :] & is_rank[:, None], other=0.0)
        product += tl.dot(h, b_tile, input_precision="ieee")
    # Only now: what is held beside the product takes registers.
    columns = matrix_of(table, entry, 3)
    is_changed = is_column & (columns != 0)
    gains = columns.to(tl.pointer_type(tl.float32)) + n
    gain = tl.load(gains, mask=is_changed, other=1.0)
    shift = tl.load(gains + width, mask=is_changed, other=0.0)
    rows = tl.multiple_of(matrix.to(tl.pointer_type(x.dtype.element_ty)), 16) + ids[:, None] * width + n[None, :]
    base = tl.load(target, mask=is_target & (matrix == 0), other=0.0)
    known = tl.where(matrix == 0, base, tl.load(rows, mask=is_target & (matrix != 0), other=0.0))
    product += known.to(tl.float32) * gain[None, :] + shift[None, :]
    tl.store(target, product.to(x.dtype.element_ty), mask=is_target)
