"""GPU kernel for the gated activation."""

import triton
import triton.language as tl

from kernels.overlap import take_turn
from kernels.row_quantization.kernel import store_held


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return a(gate) * up in the type of both."""
    wide, factor = gate.to(tl.float32), up.to(tl.float32)
    if ACTIVATION == "clamped":
        # Not by minimum and maximum, which would drop NaN.
        wide = tl.where(wide > 7.0, 7.0, wide)
        factor = tl.where(factor > 7.0, 7.0, tl.where(factor < -7.0, -7.0, factor)) + 1.0
    steep = wide
    if ACTIVATION == "gelu":
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    if ACTIVATION == "clamped":
        steep = 1.702 * wide
    activated = (wide / (1.0 + tl.exp(-steep))).to(gate.dtype)
    return (activated.to(tl.float32) * factor).to(gate.dtype)


@triton.jit
def activate_and_multiply_kernel(
    gate_up,
    out,
    held,
    spans,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, part) computes BLOCK columns of `out`; rows of `gate_up` are [gate | up], each `width` long.

    If LIMIT is not 0, BLOCK is at least `width` and rows of `out` are also quantized to `held`, as
    `kernels.row_quantization` defines it.
    """
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    product = gated(gate, up, ACTIVATION)
    tl.store(out + row * width + columns, product, mask=inside)
    if LIMIT > 0:
        store_held(product, held, spans, row, columns, width, LIMIT)
