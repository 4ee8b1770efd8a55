"""The GPU's mixture of experts for a row or two: weights go from memory to registers, without matrix units.

Rows are not brought together by their experts: that few seldom share one, and where they do programs that run at once
read the same weights. As in `kernels.streamed_linear.row_kernel` threads lie along the depth, and what comes next is
asked for before what is here is multiplied.
"""

import triton
import triton.language as tl

from kernels.gated_activation.kernel import gated
from kernels.overlap import let_begin, wait


@triton.jit
def _tile_of(matrix, is_wanted, n, k, at, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK_K inputs from `at` on of some outputs; none are left where the depth ends."""
    is_input = at + BLOCK_K <= DEPTH if DEPTH % BLOCK_K == 0 else at + k < DEPTH
    return tl.load(matrix + n * DEPTH + (at + k), mask=is_wanted & is_input, other=0.0)


@triton.jit
def expert_gate_up_kernel(
    x,
    experts,
    weight,
    units,
    biases,
    out,
    width,
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (pair, outputs) makes BLOCK_N columns of `out` [pairs, width] by `weight` [experts * 2 * width, DEPTH].

    Where LIMIT is above 0, weights are 8-bit floats, of which it is the largest, in `units` for each row; where it
    HAS_BIAS, `biases` has a number for each. Pairs of all rows follow one another, so that those that chose the same
    expert read its weights about at once. The next kernel begins when all programs know that the choice has been made,
    and may read that before it waits.
    """
    wait(OVERLAPS)
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    pair, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    expert = tl.load(experts + pair).to(tl.int64)
    # Past the last output lies the last output, and is not written.
    n = tl.minimum(tl.arange(0, BLOCK_N), width - 1 - begun)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    gates = weight + (expert * 2 * width + begun) * DEPTH
    ups = gates + tl.cast(width, tl.int64) * DEPTH
    inputs = x + pair // CHOSEN * DEPTH
    gate_tile = _tile_of(gates, True, n, k, 0, DEPTH, BLOCK_K)
    up_tile = _tile_of(ups, True, n, k, 0, DEPTH, BLOCK_K)
    gate_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = gate_sums
    for at in range(0, DEPTH, BLOCK_K):
        numbers = tl.load(inputs + at + k, mask=at + k < DEPTH, other=0.0).to(tl.float32)
        wide_gate, wide_up = gate_tile.to(tl.float32), up_tile.to(tl.float32)
        gate_tile = _tile_of(gates, True, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
        up_tile = _tile_of(ups, True, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
        gate_sums += wide_gate * numbers
        up_sums += wide_up * numbers
    gate, up = tl.sum(gate_sums, axis=1), tl.sum(up_sums, axis=1)
    column = begun + tl.arange(0, BLOCK_N)
    if LIMIT > 0:
        own = units + expert * 2 * width + column
        gate *= tl.load(own, mask=column < width, other=0.0) * LIMIT
        up *= tl.load(own + width, mask=column < width, other=0.0) * LIMIT
    if HAS_BIAS:
        own = biases + expert * 2 * width + column
        gate += tl.load(own, mask=column < width, other=0.0).to(tl.float32)
        up += tl.load(own + width, mask=column < width, other=0.0).to(tl.float32)
    made = gated(gate.to(dtype), up.to(dtype), ACTIVATION)
    tl.store(out + pair.to(tl.int64) * width + column, made, mask=column < width)


@triton.jit
def expert_down_kernel(
    x,
    experts,
    shares,
    weight,
    units,
    biases,
    out,
    width,
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, outputs) makes BLOCK_N columns of `out` [rows, width] by `weight` [experts * width, DEPTH].

    `x` is [rows, CHOSEN, DEPTH]; a row's sum is over all of them, by `shares` [rows, CHOSEN]. Weights and biases are as
    those of `expert_gate_up_kernel`. A tile is

        [experts of the row, outputs, inputs]

    of which the first is asked for before the kernel before has ended: which experts are read was known before that.
    """
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    row, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    c, k = tl.arange(0, BLOCK_C)[:, None, None], tl.arange(0, BLOCK_K)[None, None, :]
    # Past the last expert and the last output lie those, which are not counted and not written.
    pair = row * CHOSEN + tl.minimum(c, CHOSEN - 1)
    n = tl.minimum(begun + tl.arange(0, BLOCK_N), width - 1)[None, :, None]
    # From the L2 cache: a multiprocessor's own may still hold the layer before's, until a program there has waited.
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    own = weight + expert * width * DEPTH
    share = tl.where(c < CHOSEN, tl.load(shares + pair, cache_modifier=".cg"), 0.0)
    if HAS_BIAS:
        bias = share * tl.load(biases + expert * width + n).to(tl.float32)
    tile = _tile_of(own, c < CHOSEN, n, k, 0, DEPTH, BLOCK_K)
    if LIMIT > 0:
        share *= tl.load(units + expert * width + n) * LIMIT
    wait(OVERLAPS)
    sums = tl.zeros([1, BLOCK_N, BLOCK_K], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        numbers = tl.load(x + pair * DEPTH + (at + k), mask=at + k < DEPTH, other=0.0).to(tl.float32)
        wide = tile.to(tl.float32)
        tile = _tile_of(own, c < CHOSEN, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
        # Experts lie in the same thread: few sums are left.
        sums += tl.sum(wide * (numbers * share), axis=0, keep_dims=True)
    column = begun + tl.arange(0, BLOCK_N)[None, :]
    made = tl.sum(sums, axis=2)
    if HAS_BIAS:
        made += tl.sum(tl.sum(bias, axis=0, keep_dims=True), axis=2)
    tl.store(out + row * width + column, made.to(dtype), mask=column < width)
