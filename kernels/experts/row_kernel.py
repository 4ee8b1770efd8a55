"""GPU kernels of a mixture of experts for one or two rows: weights go from memory to registers, without matrix units.

Rows are not grouped by expert: so few rows seldom share one, and if they do, concurrent programs read the same weights.
As in `kernels.streamed_linear.row_kernel`, threads run along the depth, and the next tile is loaded before the current
one is multiplied.
"""

import triton
import triton.language as tl

from kernels.gated_activation.kernel import gated
from kernels.overlap import let_begin, wait


@triton.jit
def _tile_of(matrix, is_wanted, n, k, at, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K inputs from `at` on of some outputs, zeros past the end of the depth."""
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
    """Program (pair, outputs) computes BLOCK_N columns of `out` [pairs, width].

    `weight` is [experts * 2 * width, DEPTH]. If LIMIT is above 0, weights are FP8 with that maximum and per-row
    `units`; if HAS_BIAS, `biases` has one element per row of `weight`. Pairs of all rows are adjacent in the grid, so
    that those with the same expert read its weights at about the same time. All programs wait for the routing before
    they let the next kernel start, so that it may read the routing before it waits.
    """
    wait(OVERLAPS)
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    pair, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    expert = tl.load(experts + pair).to(tl.int64)
    # Indices past the last output are clamped to it, and not stored.
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
    """Program (row, outputs) computes BLOCK_N columns of `out` [rows, width] by `weight` [experts * width, DEPTH].

    `x` is [rows, CHOSEN, DEPTH]; the sum over a row's experts is weighted by `shares` [rows, CHOSEN]. Weights and
    biases are as in `expert_gate_up_kernel`. A tile is

        [experts of the row, outputs, inputs]

    The first tile is loaded before the preceding kernel has finished, because the routing is known earlier.
    """
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    row, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    c, k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)[None, None, :]
    # Indices past the last expert and output are clamped to those, and neither summed nor stored.
    pair = row * CHOSEN + tl.minimum(c, CHOSEN - 1)
    n = tl.minimum(begun + tl.arange(0, BLOCK_N), width - 1)
    # Loaded without the dimension of inputs: with it, a thread would load each number once for each of its inputs.
    # From the L2 cache: the L1 may still hold the previous layer's routing until a program there has waited.
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    share = tl.where(c < CHOSEN, tl.load(shares + pair, cache_modifier=".cg"), 0.0)[:, None, None]
    of_output = (expert * width)[:, None] + n[None, :]
    if HAS_BIAS:
        bias = share * tl.load(biases + of_output).to(tl.float32)[:, :, None]
    own = weight + (expert * width * DEPTH)[:, None, None]
    c, pair, n = c[:, None, None], pair[:, None, None], n[None, :, None]
    tile = _tile_of(own, c < CHOSEN, n, k, 0, DEPTH, BLOCK_K)
    if LIMIT > 0:
        share *= tl.load(units + of_output)[:, :, None] * LIMIT
    wait(OVERLAPS)
    sums = tl.zeros([1, BLOCK_N, BLOCK_K], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        numbers = tl.load(x + pair * DEPTH + (at + k), mask=at + k < DEPTH, other=0.0).to(tl.float32)
        wide = tile.to(tl.float32)
        tile = _tile_of(own, c < CHOSEN, n, k, at + BLOCK_K, DEPTH, BLOCK_K)
        # All experts lie in the same thread, so few sums stay in registers.
        sums += tl.sum(wide * (numbers * share), axis=0, keep_dims=True)
    column = begun + tl.arange(0, BLOCK_N)[None, :]
    made = tl.sum(sums, axis=2)
    if HAS_BIAS:
        made += tl.sum(tl.sum(bias, axis=0, keep_dims=True), axis=2)
    tl.store(out + row * width + column, made.to(dtype), mask=column < width)
