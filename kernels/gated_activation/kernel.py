"""The GPU's gated activation, elementwise."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def silu_and_multiply_kernel(gate_up, out, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Rows of `gate_up` are [gate | up], each `width` long; program (row, part) makes BLOCK numbers of `out`."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * width + columns, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)
