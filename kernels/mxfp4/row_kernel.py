"""GPU kernels of a mixture of experts for one or two rows with MXFP4 weights: `kernels.experts.row_kernel`, retiled.

A thread reads four words, the weights of 32 inputs of one output, and the inputs as words too, two 16-bit ones each. A
tile is

    [outputs, matrices, groups of 32 inputs, words]

where matrices are a row's gate and up, or the down matrices of all its experts. Threads run along groups and warps
along matrices, so that each thread reuses its inputs for all its outputs: dequantizing weights takes as long as reading
them, and loading inputs adds to that.
"""

import triton
import triton.language as tl

from kernels.gated_activation.kernel import gated
from kernels.mxfp4.kernel import pair_of
from kernels.overlap import let_begin, wait

INPUT_SCALE: tl.constexpr = tl.constexpr(2.0**64)
"""Inputs are scaled up and units down by this: products with weights not yet scaled by their unit would underflow."""


@triton.jit
def _inputs_of(x, group, is_group, PAIR: tl.constexpr, dtype: tl.constexpr):
    """Return the even and odd inputs of pair PAIR of each word, in float32, scaled; `x` points to words."""
    word = tl.arange(0, 4)[None, None, None, :]
    if dtype == tl.float32:
        at = x + group * 32 + 8 * PAIR + 2 * word
        even = tl.load(at, mask=is_group, other=0).to(dtype, bitcast=True)
        odd = tl.load(at + 1, mask=is_group, other=0).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        both = tl.load(x + group * 16 + 4 * PAIR + word, mask=is_group, other=0)
        # bfloat16 is the upper half of a float32.
        even = (both << 16).to(tl.float32, bitcast=True)
        odd = (both & -0x10000).to(tl.float32, bitcast=True)
    else:
        both = tl.load(x + group * 16 + 4 * PAIR + word, mask=is_group, other=0)
        even = both.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        odd = (both >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return even * INPUT_SCALE, odd * INPUT_SCALE


@triton.jit
def _words_of(held, line, group, is_group, GROUPS: tl.constexpr):
    """Return the words of some groups, zeros past the end of the depth."""
    word = tl.arange(0, 4)[None, None, None, :]
    return tl.load(held + (line * GROUPS + group) * 4 + word, mask=is_group, other=0)


@triton.jit
def _units_of(units, line, group, is_group, GROUPS: tl.constexpr):
    """Return the words that contain the units of some groups."""
    return tl.load(units + line * ((GROUPS + 3) // 4) + group // 4, mask=is_group, other=0)


@triton.jit
def _products_of(words, units, x, group, is_group, dtype: tl.constexpr):
    """Return the products of weights and inputs summed over each group, [outputs, matrices, groups, 1]."""
    sums = tl.zeros(words.shape, tl.float32)
    for PAIR in tl.static_range(4):
        even, odd = _inputs_of(x, group, is_group, PAIR, dtype)
        pair = pair_of(words, PAIR)
        sums += (pair << 16).to(tl.float32, bitcast=True) * even
        sums += (pair & -0x10000).to(tl.float32, bitcast=True) * odd
    unit = ((units >> 8 * (group % 4)) & 255) - 64
    return tl.sum(sums, axis=3, keep_dims=True) * (unit << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_gate_up_kernel(
    x,
    experts,
    held,
    units,
    biases,
    out,
    width,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (pair, outputs) computes BLOCK_N columns of `out` [pairs, width], as `expert_gate_up_kernel` does.

    Rows of `x` and of weights have GROUPS * 32 inputs.
    """
    wait(OVERLAPS)
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    WORDS: tl.constexpr = GROUPS * (32 if dtype == tl.float32 else 16)
    pair, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    expert = tl.load(experts + pair).to(tl.int64)
    # Indices past the last output are clamped to it, and not stored.
    n = tl.minimum(tl.arange(0, BLOCK_N), width - 1 - begun)[:, None, None, None]
    line = expert * 2 * width + begun + tl.arange(0, 2)[None, :, None, None] * width + n
    inputs = x + pair // CHOSEN * WORDS
    group = tl.arange(0, BLOCK_G)[None, None, :, None]
    words = _words_of(held, line, group, group < GROUPS, GROUPS)
    unit = _units_of(units, line, group, group < GROUPS, GROUPS)
    sums = tl.zeros([BLOCK_N, 2, BLOCK_G, 1], tl.float32)
    for at in range(0, GROUPS, BLOCK_G):
        here, there = at + group, at + BLOCK_G + group
        these, own = words, unit
        words = _words_of(held, line, there, there < GROUPS, GROUPS)
        unit = _units_of(units, line, there, there < GROUPS, GROUPS)
        sums += _products_of(these, own, inputs, here, here < GROUPS, dtype)
    both = tl.sum(tl.sum(sums, axis=3), axis=2)
    is_gate = tl.arange(0, 2)[None, :] == 0
    gate, up = tl.sum(tl.where(is_gate, both, 0.0), axis=1), tl.sum(tl.where(is_gate, 0.0, both), axis=1)
    column = begun + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        bias = biases + expert * 2 * width + column
        gate += tl.load(bias, mask=column < width, other=0.0).to(tl.float32)
        up += tl.load(bias + width, mask=column < width, other=0.0).to(tl.float32)
    made = gated(gate.to(dtype), up.to(dtype), ACTIVATION)
    tl.store(out + pair.to(tl.int64) * width + column, made, mask=column < width)


@triton.jit
def mxfp4_down_kernel(
    x,
    experts,
    shares,
    held,
    units,
    biases,
    out,
    width,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, outputs) computes BLOCK_N columns of `out` [rows, width], as `expert_down_kernel` does."""
    let_begin(OVERLAPS)
    dtype = out.dtype.element_ty
    WORDS: tl.constexpr = GROUPS * (32 if dtype == tl.float32 else 16)
    row, begun = tl.program_id(0), tl.program_id(1) * BLOCK_N
    c = tl.arange(0, BLOCK_C)
    # Indices past the last expert and output are clamped to those, and neither summed nor stored.
    pair = row * CHOSEN + tl.minimum(c, CHOSEN - 1)
    n = tl.minimum(begun + tl.arange(0, BLOCK_N), width - 1)
    # From the L2 cache and without the other dimensions, as in `expert_down_kernel`.
    line = (tl.load(experts + pair, cache_modifier=".cg").to(tl.int64) * width)[None, :] + n[:, None]
    share = tl.where(c < CHOSEN, tl.load(shares + pair, cache_modifier=".cg"), 0.0)[None, :, None, None]
    if HAS_BIAS:
        bias = tl.load(biases + line).to(tl.float32)[:, :, None, None]
    c, pair, line = c[None, :, None, None], pair[None, :, None, None], line[:, :, None, None]
    group = tl.arange(0, BLOCK_G)[None, None, :, None]
    words = _words_of(held, line, group, (c < CHOSEN) & (group < GROUPS), GROUPS)
    unit = _units_of(units, line, group, (c < CHOSEN) & (group < GROUPS), GROUPS)
    wait(OVERLAPS)
    sums = tl.zeros([BLOCK_N, BLOCK_C, BLOCK_G, 1], tl.float32)
    for at in range(0, GROUPS, BLOCK_G):
        here, there = at + group, at + BLOCK_G + group
        these, own = words, unit
        words = _words_of(held, line, there, (c < CHOSEN) & (there < GROUPS), GROUPS)
        unit = _units_of(units, line, there, (c < CHOSEN) & (there < GROUPS), GROUPS)
        sums += _products_of(these, own, x + pair * WORDS, here, here < GROUPS, dtype)
    made = tl.sum(sums, axis=2, keep_dims=True)
    if HAS_BIAS:
        made += bias
    made = tl.sum(tl.sum(tl.sum(made * share, axis=3), axis=2), axis=1)
    column = begun + tl.arange(0, BLOCK_N)
    tl.store(out + row * width + column, made.to(dtype), mask=column < width)
