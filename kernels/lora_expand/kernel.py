"""The GPU's LoRA expand: low-rank activations times B, added to the output where it lies."""

import triton
import triton.language as tl

from kernels.lora_shrink.kernel import matrix_of, row_length
from kernels.search import place_of


@triton.jit(do_not_specialize=["num_tokens", "entry", "num_modules"])
def lora_expand_kernel(
    shrunk,
    segments,
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
):
    """Program (tile, columns, module) adds to [tokens, y_width], where the modules' outputs lie side by side.

    Segments and `shrunk` are those of `kernels.lora_shrink.kernel`, B's of TYPE with rows as long as `row_length` says;
    out_i is module i's width, 0 for none. Of an adapter with gains and shifts, float32 [2, out_i], the output is
    y * gain + shift before the sum.
    """
    tile, part, module = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_segments = tl.load(count)
    if num_segments == 0:
        return
    out = tl.where(module == 0, out_0, tl.where(module == 1, out_1, out_2))
    column = tl.where(module == 0, 0, tl.where(module == 1, out_0, out_0 + out_1))
    segment, start, within = place_of(segments, 3, num_segments, tile, BLOCK_M)
    end = tl.load(segments + segment * 3 + 1)
    token = start + within * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = matrix_of(segments, segment, entry + module, 2)
    columns = matrix_of(segments, segment, entry + module, 3)
    if (start + within * BLOCK_M >= end) | ((rank == 0) & (columns == 0)) | (part * BLOCK_N >= out):
        return
    is_token = token < end
    b = tl.multiple_of(matrix_of(segments, segment, entry + module, 1).to(tl.pointer_type(TYPE)), 16)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column, length = n < out, row_length(rank)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for low in range(0, rank, BLOCK_R):
        r = low + tl.arange(0, BLOCK_R)
        h = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            source = ((split * num_tokens + token) * num_modules + module) * room
            h += tl.load(shrunk + source[:, None] + r[None, :], mask=is_token[:, None], other=0.0)
        is_number = is_column[None, :] & (r < length)[:, None]
        b_tile = tl.load(b + n[None, :] * length + r[:, None], mask=is_number, other=0.0)
        product += tl.dot(h.to(b_tile.dtype), b_tile, input_precision="ieee")
    target = y + token[:, None] * y_width + (column + n)[None, :]
    is_target = is_token[:, None] & is_column[None, :]
    known = tl.load(target, mask=is_target, other=0.0)
    is_changed = is_column & (columns != 0)
    gains = columns.to(tl.pointer_type(tl.float32)) + n
    gain = tl.load(gains, mask=is_changed, other=1.0)[None, :]
    shift = tl.load(gains + out, mask=is_changed, other=0.0)[None, :]
    tl.store(target, (known.to(tl.float32) * gain + shift + product).to(y.dtype.element_ty), mask=is_target)
