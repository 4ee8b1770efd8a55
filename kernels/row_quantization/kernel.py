"""GPU quantization of rows to 8 bits: functions for kernels that already hold rows, and a kernel of its own."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def span_of(rows):
    """Return the spans of float32 rows [..., width]; NaN for a row that is not finite."""
    # A maximum drops NaN; zero times NaN or infinity keeps it.
    return tl.max(tl.abs(rows), axis=-1) + tl.sum(rows * 0.0, axis=-1)


@triton.jit
def held(rows, span, LIMIT: tl.constexpr, HELD: tl.constexpr):
    """Quantize float32 rows with spans `span`, which broadcast to them, to type HELD."""
    # Zeros stay zeros, and tiny rows become zeros.
    scaled = rows * tl.div_rn(LIMIT, tl.where(span < 1e-30, LIMIT, span))
    if tl.int8 == HELD:
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even; a conversion would truncate.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled.to(HELD)


@triton.jit
def store_held(numbers, held_numbers, spans, row, columns, width, LIMIT: tl.constexpr):
    """Quantize and store one row [BLOCK], zeros from `width` on."""
    # A span in a tensor of one element would be broadcast in a layout in which each thread has the whole row.
    wide = numbers.to(tl.float32)
    span = span_of(wide)
    # Stored first: a register fewer is in use after that, and none spills.
    tl.store(spans + row, span)
    rounded = held(wide, span, LIMIT, held_numbers.dtype.element_ty)
    tl.store(held_numbers + row * width + columns, rounded, mask=columns < width)


@triton.jit
def quantize_rows_kernel(x, out, spans, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program r quantizes row r of `x` [rows, width], read once, to the type of `out`; BLOCK is at least `width`."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * width + columns, mask=columns < width, other=0.0)
    store_held(numbers, out, spans, row, columns, width, LIMIT)
