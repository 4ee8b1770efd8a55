"""GPU kernel for linear products of few rows: weights are read once, by enough programs to saturate memory."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def _number(level, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return a large power of two, with bits BITS, plus `level`, by writing it into the lowest mantissa bits.

    Integer conversions are slow on GPUs, and this saves one per weight.
    """
    return (level.to(tl.uint16) | BITS).to(dtype, bitcast=True)


@triton.jit
def _units_of(units, n, is_output, width, at, GROUP: tl.constexpr):
    """Load the units of 64 inputs from `at` on: [outputs, 1] if they are in one group, else [outputs, 64]."""
    if GROUP >= 64:
        found = tl.load(units + at // GROUP * width + n, mask=is_output, other=0)[:, None]
    else:
        group = at // GROUP + tl.arange(0, 64 // GROUP)
        few = tl.load(units + group[None, :] * width + n[:, None], mask=is_output[:, None], other=0)
        found = tl.broadcast_to(few[:, :, None], [n.shape[0], 64 // GROUP, GROUP]).reshape([n.shape[0], 64])
    return found


@triton.jit
def _weights_of(levels, units, BITS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize levels [outputs, 64]."""
    scale = units.to(tl.int16).to(dtype, bitcast=True)
    # The difference of two such numbers is a small integer and exact. The product is rounded, as in the definition.
    return (_number(levels, BITS, dtype) - _number(units >> 16, BITS, dtype)) * scale


@triton.jit
def block_of(held, units, n, is_output, width, depth, at, GROUP: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return the weights of a block of 128 inputs from `at` on, as two halves [outputs, 64]."""
    place = n.to(tl.int64)[:, None] * (depth // 2) + at // 2 + tl.arange(0, 64)[None, :]
    packed = tl.load(held + place, mask=is_output[:, None], other=0)
    first = _units_of(units, n, is_output, width, at, GROUP)
    second = first
    if GROUP < 128:
        second = _units_of(units, n, is_output, width, at + 64, GROUP)
    return _weights_of(packed & 15, first, BITS, dtype), _weights_of(packed >> 4, second, BITS, dtype)


@triton.jit
def _tile_of(matrix, row, is_row, depth, at, last, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns from `at` on of some rows of a matrix, zeros from `last` on."""
    k = at + tl.arange(0, BLOCK_K)
    place = row.to(tl.int64)[:, None] * depth + k[None, :]
    return tl.load(matrix + place, mask=is_row[:, None] & (k < last)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def streamed_linear_kernel(
    x,
    spans,
    weight,
    units,
    bias,
    parts,
    arrived,
    out,
    rows,
    width,
    depth,
    GROUP: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (outputs, rows, split of the depth) computes a part of `out` [rows, width]; the last one sums the parts.

    Which program is last varies, but parts are summed in fixed order. `parts` is float32 [splits, rows, width];
    `arrived` is int32, one counter per tile of outputs and rows, zero before and after the launch. Products are
    transposed: dequantized weights are in registers, and matrix instructions take only the left operand from there.
    Weights are int4 in groups of GROUP inputs, or of the type of `x` if GROUP is 0. If IS_FP8, both are FP8, and sums
    are multiplied by `spans` [rows] and `units` [width] at the end.
    """
    take_turn(OVERLAPS)
    part_n, part_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m = part_n * BLOCK_N + tl.arange(0, BLOCK_N), part_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_row = n < width, m < rows
    share = tl.cdiv(tl.cdiv(depth, BLOCK_K), NUM_SPLITS) * BLOCK_K
    first, last = split * share, tl.minimum(depth, (split + 1) * share)
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_FP8:
        # Loaded early: at the end each program would wait for them.
        unit = tl.load(units + n, mask=is_output, other=0.0)
        span = tl.load(spans + m, mask=is_row, other=0.0)
    for at in range(first, last, BLOCK_K):
        if GROUP:
            low, high = block_of(weight, units, n, is_output, width, depth, at, GROUP, BITS, x.dtype.element_ty)
            product = tl.dot(low, tl.trans(_tile_of(x, m, is_row, depth, at, last, 64)), product)
            product = tl.dot(high, tl.trans(_tile_of(x, m, is_row, depth, at + 64, last, 64)), product)
        else:
            w_tile = _tile_of(weight, n, is_output, depth, at, last, BLOCK_K)
            x_tile = tl.trans(_tile_of(x, m, is_row, depth, at, last, BLOCK_K))
            if IS_FP8:
                # Hopper's matrix units accumulate FP8 products with 14 bits, so sums are promoted to float32 every
                # 128 inputs (DeepSeek-V3, 2024, arXiv 2412.19437, section 3.3.2).
                product = tl.dot(w_tile, x_tile, product, max_num_imprecise_acc=128)
            else:
                product = tl.dot(w_tile, x_tile, product, input_precision="ieee")
    place = m[None, :] * width + n[:, None]
    is_place = is_output[:, None] & is_row[None, :]
    if NUM_SPLITS > 1:
        tl.store(parts + split * rows * width + place, product, mask=is_place)
        # The barrier makes all threads write before the counter is incremented; acq_rel orders it after the writes.
        tl.debug_barrier()
        tile = arrived + part_n * tl.num_programs(1) + part_m
        if tl.atomic_add(tile, 1, sem="acq_rel") < NUM_SPLITS - 1:
            return
        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in range(NUM_SPLITS):
            product += tl.load(parts + other * rows * width + place, mask=is_place, other=0.0, cache_modifier=".cg")
        tl.store(tile, 0)
    if IS_FP8:
        product = product * unit[:, None] * span[None, :]
    if HAS_BIAS:
        product += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, product.to(out.dtype.element_ty), mask=is_place)


@triton.jit
def from_int4_kernel(held, units, out, width, depth, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (outputs, block of inputs) writes the dequantized weights [width, depth]."""
    at = tl.program_id(1) * 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < width
    low, high = block_of(held, units, n, is_output, width, depth, at, GROUP, BITS, out.dtype.element_ty)
    target = out + n.to(tl.int64)[:, None] * depth + at + tl.arange(0, 64)[None, :]
    tl.store(target, low, mask=is_output[:, None])
    tl.store(target + 64, high, mask=is_output[:, None])
