"""GPU kernel for adapters of the embedding: replaced embedding matrices and LoRA products, by token id."""

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
    """Program (tile, columns) applies the tile's adapter in place to embedded tokens [tokens, width].

    Tiles are those of `kernels.lora_shrink.kernel`. Part 0 of the entry `own` is the address of a matrix [vocab, width]
    that replaces the base's embedding, 0 for none. Parts 0 and 1 of `entry` are the addresses of A [vocab, rank], whose
    rows are gathered, and of B [width, rank], both with rows padded to `row_length`; part 3 is that of gains and
    shifts, float32 [2, width], applied to the embedding's rows, 0 for none.
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
    # Loaded only now, to save registers during the product.
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
