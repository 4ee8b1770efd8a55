"""The GPU's LoRA shrink: tiles of tokens of one adapter, every adapter at its own rank."""

import triton
import triton.language as tl

from kernels.search import place_of

ROW_STEP = tl.constexpr(8)
"""What divides the length of a row of B, zeros behind the rank's numbers: the widest load takes as many short ones."""


@triton.jit
def row_length(rank):
    """Return how many numbers lie between the beginnings of two rows of `rank` numbers each."""
    return tl.cdiv(rank, ROW_STEP) * ROW_STEP


@triton.jit
def matrix_of(segments, segment, entry, part: tl.constexpr):
    """Return a number of a segment's adapter for the module `entry`.

    Part 0 is the address of A, 1 of B, 2 the rank, 3 the address of gains and shifts of columns, 0 for none.
    """
    table = tl.load(segments + segment * 3 + 2).to(tl.pointer_type(tl.int64))
    return tl.load(table + entry * 4 + part)


@triton.jit(do_not_specialize=["num_tokens", "entry", "num_modules"])
def lora_shrink_kernel(
    x,
    segments,
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
):
    """Program (tile, module, split of the depth) writes float32 [splits, tokens, modules, room].

    Up to the end of a tile there are zeros behind an adapter's rank, so that whoever reads them needs no mask for it.
    Splits are summed by that one, always in one order: a sum by atomics would depend on who comes first.
    Segments are [start, end, address of a table], int64, `count` of them, a number on the device.
    """
    tile, module, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_segments = tl.load(count)
    if num_segments == 0:
        return
    segment, start, within = place_of(segments, 3, num_segments, tile, BLOCK_M)
    end = tl.load(segments + segment * 3 + 1)
    token = start + within * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = matrix_of(segments, segment, entry + module, 2)
    if (start + within * BLOCK_M >= end) | (rank == 0):
        return
    is_token = token < end
    address = matrix_of(segments, segment, entry + module, 0)
    a = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    share = tl.cdiv(tl.cdiv(width, BLOCK_K), NUM_SPLITS) * BLOCK_K
    first, last = split * share, tl.minimum(width, (split + 1) * share)
    for low in range(0, rank, BLOCK_R):
        r = low + tl.arange(0, BLOCK_R)
        is_rank = r < rank
        product = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for at in range(first, last, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            is_depth = k < last
            x_tile = tl.load(
                x + token[:, None] * width + k[None, :], mask=is_token[:, None] & is_depth[None, :], other=0.0
            )
            a_tile = tl.load(a + r[None, :] * width + k[:, None], mask=is_rank[None, :] & is_depth[:, None], other=0.0)
            product += tl.dot(x_tile, a_tile, input_precision="ieee")
        target = ((split * num_tokens + token) * num_modules + module) * room
        tl.store(shrunk + target[:, None] + r[None, :], product, mask=is_token[:, None])
