"""The GPU's residual sum and norm: one program a row, one pass over it."""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait


@triton.jit
def add_rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    width,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Rows [width] of `x`, `delta` and `out` lie one after the other; BLOCK is a power of two and at least `width`."""
    let_begin(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    wait(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * width + columns
    value = tl.load(x + at, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(x + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + at, normed.to(value.dtype), mask=inside)
