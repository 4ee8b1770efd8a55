"""GPU kernel for the residual sum and norm: one program per row, one pass over it."""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait
from kernels.row_quantization.kernel import store_held


@triton.jit
def add_rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    held,
    spans,
    width,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program r processes row r of `x`, `delta` and `out`, contiguous [rows, width].

    BLOCK is a power of two and at least `width`. If LIMIT is not 0, rows of `out` are also quantized to `held`, as
    `kernels.row_quantization` defines it.
    """
    let_begin(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = row * width + columns
    value = tl.load(x + at, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(x + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = ((wide * scale).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(value.dtype)
    tl.store(out + at, normed, mask=inside)
    if LIMIT > 0:
        store_held(normed, held, spans, row, columns, width, LIMIT)
