"""GPU kernel for linear products of one or two rows: weights go from memory to registers, without matrix units.

A program has some outputs. Its threads run along the depth, each with the same inputs for every output, so that sums
are reduced across threads only once, at the end. The first weights are loaded before the program waits for the
preceding kernel.

The operations before and after a product in a layer cost less than a kernel launch, so they are fused: each program
norms the inputs itself while it accumulates, and outputs may be added to the residual.
"""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait


@triton.jit
def _tile_of(matrix, n, k, at, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K inputs from `at` on of some outputs, [1, outputs, BLOCK_K], zeros past the end of the depth."""
    is_input = at + BLOCK_K <= DEPTH if DEPTH % BLOCK_K == 0 else at + k < DEPTH
    # Weights are read only once.
    return tl.load(matrix + n * DEPTH + (at + k), mask=is_input, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def row_kernel(
    x,
    weight,
    units,
    bias,
    gain,
    out,
    rows,
    width,
    eps,
    DEPTH: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program p computes BLOCK_N columns of `out` [rows, width], with at most BLOCK_M rows.

    If IS_GATED, the weights are [gate | up], `width` outputs each, and the result is silu(gate) * up, as
    `kernels.gated_activation` defines it. If LIMIT is above 0, weights are FP8 with that maximum and per-output
    `units`. If HAS_NORM, inputs are normed by `gain` [DEPTH] and `eps`; if IS_ADDED, the result is added to `out`.
    Offsets within a program's weights fit 32 bits.
    """
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    first = tl.program_id(0) * BLOCK_N
    # Indices past the last output are clamped to it, and not stored.
    n = tl.minimum(tl.arange(0, BLOCK_N), width - 1 - first)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    gates = weight + first.to(tl.int64) * DEPTH
    ups = gates + tl.cast(width, tl.int64) * DEPTH
    tile = _tile_of(gates, n, k, 0, DEPTH, BLOCK_K)
    up_tile = tile
    if IS_GATED:
        up_tile = _tile_of(ups, n, k, 0, DEPTH, BLOCK_K)
    row, column = tl.arange(0, BLOCK_M)[:, None], first + tl.arange(0, BLOCK_N)[None, :]
    if HAS_NORM:
        gains = tl.load(gain + k, mask=k < DEPTH, other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        if IS_GATED:
            up_shift = tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)
    if LIMIT > 0:
        scale = tl.load(units + column, mask=column < width, other=0.0) * LIMIT
        if IS_GATED:
            up_scale = tl.load(units + width + column, mask=column < width, other=0.0) * LIMIT
    wait(OVERLAPS)
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1)[:, None, None]
    if IS_ADDED:
        before = tl.load(out + row * width + column, mask=(row < rows) & (column < width), other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    up_sums = sums
    squares = tl.zeros([BLOCK_M, 1, BLOCK_K], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        is_input = at + BLOCK_K <= DEPTH if DEPTH % BLOCK_K == 0 else at + k < DEPTH
        inputs = tl.load(x + m * DEPTH + (at + k), mask=is_input, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += inputs * inputs
            inputs *= gains.to(tl.float32)
            after = at + BLOCK_K + k
            gains = tl.load(gain + after, mask=after < DEPTH, other=0.0)
        wide = tile.to(tl.float32)
        tile = _tile_of(gates, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
        sums += wide * inputs
        if IS_GATED:
            wide = up_tile.to(tl.float32)
            up_tile = _tile_of(ups, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
            up_sums += wide * inputs
    product = tl.sum(sums, axis=2)
    if HAS_NORM:
        # The norm's factor is the same for all inputs of a row, so it multiplies the sum.
        spread = tl.rsqrt(tl.sum(squares, axis=2) / DEPTH + eps)
        product *= spread
    if LIMIT > 0:
        product *= scale
    if HAS_BIAS:
        product += shift
    if IS_GATED:
        up = tl.sum(up_sums, axis=2)
        if HAS_NORM:
            up *= spread
        if LIMIT > 0:
            up *= up_scale
        if HAS_BIAS:
            up += up_shift
        gate = product.to(dtype).to(tl.float32)
        product = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if IS_ADDED:
        product = before + product.to(dtype).to(tl.float32)
    tl.store(out + row * width + column, product.to(dtype), mask=(row < rows) & (column < width))
