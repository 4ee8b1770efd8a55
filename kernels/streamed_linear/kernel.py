"""GPU kernel for linear products of few rows: weights are read once, by enough programs to saturate memory."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def _unit_of(units, dtype: tl.constexpr):
    """Load units [outputs]; return their marks, negative zero points and scales, [outputs, 1] each."""
    unit = tl.load(units)[:, None]
    zero = unit >> 16
    # From memory, as the compiler would take a constant apart and use an instruction more for each pair of weights.
    marks = (unit & -0x1000000) | (zero & 0xFF00)
    return marks, -zero.to(tl.int16).to(dtype, bitcast=True), unit.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _steps_of(words, marks, minus, PAIR: tl.constexpr, dtype: tl.constexpr):
    """Return level - zero of 32 inputs of each output, from pair PAIR of its words [outputs, 16].

    A level is written into the lowest mantissa bits of a large power of two. Integer conversions are slow on GPUs, and
    the difference of two such numbers is exact.
    """
    pair = ((words >> 4 * PAIR) & 0x000F000F) | marks
    # In this order, both halves are one instruction.
    odd = (pair >> 16).to(tl.int16).to(dtype, bitcast=True) + minus
    even = pair.to(tl.int16).to(dtype, bitcast=True) + minus
    return tl.interleave(even, odd)


@triton.jit
def add_int4(product, x, row, held, units, line, num_lines, depth, at, GROUP: tl.constexpr):
    """Add the product of 128 inputs from `at` on to `product` [lines, rows]; all lines and rows exist.

    `held` is [num_lines, depth / 8]. Sums are multiplied by the scale, not weights, as there are fewer.
    """
    dtype = x.dtype.element_ty
    words = tl.load(held + line.to(tl.int64)[:, None] * (depth // 8) + (at // 8 + tl.arange(0, 16)[None, :]))
    inputs = x + row.to(tl.int64)[:, None] * depth + (at + tl.arange(0, 32)[None, :])
    for PAIR in tl.static_range(4):
        if 32 * PAIR % GROUP == 0:
            part = tl.zeros(product.shape, tl.float32)
            marks, minus, scale = _unit_of(units + (at + 32 * PAIR) // GROUP * num_lines + line, dtype)
        part = tl.dot(_steps_of(words, marks, minus, PAIR, dtype), tl.trans(tl.load(inputs + 32 * PAIR)), part)
        if PAIR == 3 or 32 * (PAIR + 1) % GROUP == 0:
            product += part * scale.to(tl.float32)
    return product


@triton.jit
def tile_of(matrix, row, is_row, depth, at, last, BLOCK_K: tl.constexpr):
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
            # Masks would be a sixth of the loop's instructions.
            row, line = tl.minimum(m, rows - 1), tl.minimum(n, width - 1)
            product = add_int4(product, x, row, weight, units, line, width, depth, at, GROUP)
        else:
            w_tile = tile_of(weight, n, is_output, depth, at, last, BLOCK_K)
            x_tile = tl.trans(tile_of(x, m, is_row, depth, at, last, BLOCK_K))
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
def from_int4_kernel(held, units, out, width, depth, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (outputs, block of inputs) writes the dequantized weights [width, depth]."""
    dtype = out.dtype.element_ty
    at, n = tl.program_id(1) * 128, tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(n, width - 1).to(tl.int64)[:, None] * depth
    words = tl.load(held + line // 8 + (at // 8 + tl.arange(0, 16)[None, :]))
    for PAIR in tl.static_range(4):
        begin = at + 32 * PAIR
        marks, minus, scale = _unit_of(units + begin // GROUP * width + tl.minimum(n, width - 1), dtype)
        weights = _steps_of(words, marks, minus, PAIR, dtype) * scale
        tl.store(out + line + begin + tl.arange(0, 32)[None, :], weights, mask=(n < width)[:, None])
