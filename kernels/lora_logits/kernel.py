"""GPU kernel for logits from adapters' own output matrices, which are read once per tile of rows, without copies."""

import triton
import triton.language as tl

from kernels.lora_shrink.kernel import matrix_of, tile_at


@triton.jit(do_not_specialize=["entry"])
def lora_logits_kernel(
    x,
    tiles,
    count,
    logits,
    width,
    depth,
    entry,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile, columns) writes `logits` float32 [rows, width] for a tile whose adapter has an output matrix.

    Tiles are those of `kernels.lora_shrink.kernel`; part 1 of the entry is the address of the matrix [width, depth],
    0 for none. The product is transposed, to put the matrix's many rows on the long side of the matrix instruction.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.load(count)
    start, end, table = tile_at(tiles, tile)
    if tile >= num_tiles:
        return
    matrix = matrix_of(table, entry, 1)
    if matrix == 0:
        return
    row = start + tl.arange(0, BLOCK_M)
    n = (part * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row, is_column = row < end, n < width
    weight = tl.multiple_of(matrix.to(tl.pointer_type(x.dtype.element_ty)), 16)
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, depth, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        is_depth = (k < depth)[None, :]
        tile_w = tl.load(weight + n[:, None] * depth + k[None, :], mask=is_column[:, None] & is_depth, other=0.0)
        tile_x = tl.load(x + row[:, None] * depth + k[None, :], mask=is_row[:, None] & is_depth, other=0.0)
        product = tl.dot(tile_w, tl.trans(tile_x), product, input_precision="ieee")
    tl.store(logits + row[None, :] * width + n[:, None], product, mask=is_column[:, None] & is_row[None, :])
