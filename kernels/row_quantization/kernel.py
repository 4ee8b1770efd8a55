"""The GPU's rounding of rows to one byte a number: for kernels that have rows at hand, and by itself."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def span_of(rows):
    """Return what rows [n, width] of float32 span; NaN where one of their numbers is not finite."""
    # A maximum leaves NaN out; zero times NaN, or times infinity, does not.
    return tl.max(tl.abs(rows), axis=1) + tl.sum(rows * 0.0, axis=1)


@triton.jit
def held(rows, span, LIMIT: tl.constexpr, HELD: tl.constexpr):
    """Return float32 rows [n, width] that span `span` [n] as numbers of type HELD."""
    # Zeros stay zeros, and what is nearly zero becomes it.
    scaled = rows * tl.div_rn(LIMIT, tl.where(span < 1e-30, LIMIT, span))[:, None]
    if tl.int8 == HELD:
        # Added to 1.5 * 2^23 a number is rounded to a whole one, halves to the even; a conversion would cut it off.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled.to(HELD)


@triton.jit
def store_held(numbers, held_numbers, spans, row, columns, width, LIMIT: tl.constexpr):
    """Round one row's numbers [BLOCK], zeros from `width` on, as `quantize_rows_kernel` rounds what it reads."""
    rows = numbers.to(tl.float32)[None, :]
    span = span_of(rows)
    place = row * width + columns[None, :]
    rounded = held(rows, span, LIMIT, held_numbers.dtype.element_ty)
    tl.store(held_numbers + place, rounded, mask=(columns < width)[None, :])
    tl.store(spans + row + tl.arange(0, 1), span)


@triton.jit
def quantize_rows_kernel(x, out, spans, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program r rounds row r of `x` [rows, width], read once, to the type of `out`; BLOCK is at least `width`."""
    take_turn(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    place = at[:, None] * width + columns[None, :]
    inside = (columns < width)[None, :]
    rows = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    span = span_of(rows)
    tl.store(out + place, held(rows, span, LIMIT, out.dtype.element_ty), mask=inside)
    tl.store(spans + at, span)
