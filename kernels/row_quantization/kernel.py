"""GPU quantization of rows to 8 bits: functions for kernels that already hold rows, and a kernel of its own."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def span_of(rows):
    """Return the spans of float32 rows [n, width]; NaN for a row that is not finite."""
    # A maximum drops NaN; zero times NaN or infinity keeps it.
    return tl.max(tl.abs(rows), axis=1) + tl.sum(rows * 0.0, axis=1)


@triton.jit
def held(rows, span, LIMIT: tl.constexpr, HELD: tl.constexpr):
    """Quantize float32 rows [n, width] with spans `span` [n] to type HELD."""
    # Zeros stay zeros, and tiny rows become zeros.
    scaled = rows * tl.div_rn(LIMIT, tl.where(span < 1e-30, LIMIT, span))[:, None]
    if tl.int8 == HELD:
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even; a conversion would truncate.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled.to(HELD)


@triton.jit
def store_held(numbers, held_numbers, spans, row, columns, width, LIMIT: tl.constexpr):
    """Quantize and store one row [BLOCK], zeros from `width` on, as `quantize_rows_kernel` does."""
    rows = numbers.to(tl.float32)[None, :]
    span = span_of(rows)
    place = row * width + columns[None, :]
    rounded = held(rows, span, LIMIT, held_numbers.dtype.element_ty)
    tl.store(held_numbers + place, rounded, mask=(columns < width)[None, :])
    tl.store(spans + row + tl.arange(0, 1), span)


@triton.jit
def quantize_rows_kernel(x, out, spans, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program r quantizes row r of `x` [rows, width], read once, to the type of `out`; BLOCK is at least `width`."""
    take_turn(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    place = at[:, None] * width + columns[None, :]
    inside = (columns < width)[None, :]
    rows = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    span = span_of(rows)
    tl.store(out + place, held(rows, span, LIMIT, out.dtype.element_ty), mask=inside)
    tl.store(spans + at, span)
