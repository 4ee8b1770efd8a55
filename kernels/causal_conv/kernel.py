"""GPU kernels for the causal convolution."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def activated(x, HAS_SILU: tl.constexpr):
    """Return x / (1 + exp(-x)) of float32 numbers, or themselves."""
    return x / (1.0 + tl.exp(-x)) if HAS_SILU else x


@triton.jit(do_not_specialize=["tokens"])
def causal_conv_kernel(
    x,
    weight,
    bias,
    y,
    tokens,
    channels,
    stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, tokens, row) computes BLOCK_T tokens of BLOCK_C channels; before the first token are zeros."""
    take_turn(OVERLAPS)
    row = tl.program_id(2).to(tl.int64)
    at = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = columns < channels
    inside = (at < tokens)[:, None] & is_channel[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        source = at - (WIDTH - 1) + j
        tap = tl.load(weight + columns * WIDTH + j, mask=is_channel, other=0.0).to(tl.float32)
        x_at = x + (row * tokens + source)[:, None] * stride + columns[None, :]
        total += tl.load(x_at, mask=inside & (source >= 0)[:, None], other=0.0).to(tl.float32) * tap[None, :]
    y_at = y + (row * tokens + at)[:, None] * channels + columns[None, :]
    tl.store(y_at, activated(total, HAS_SILU).to(y.dtype.element_ty), mask=inside)


@triton.jit
def causal_conv_step_kernel(
    x,
    states,
    places,
    are_new,
    weight,
    bias,
    y,
    channels,
    stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IS_HELD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, row) computes BLOCK_C channels of a row of one token, and shifts its input into the state.

    If IS_HELD, row i's state is that of `places[i]`, and zeros if `are_new[i]`.
    """
    take_turn(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    taps = tl.arange(0, BLOCK_W)
    is_channel = columns < channels
    inside = is_channel[:, None] & (taps < WIDTH)[None, :]
    place, is_old = row, True
    if IS_HELD:
        place = tl.load(places + row)
        is_old = tl.load(are_new + row) == 0
    own = states + (place * channels + columns)[:, None] * WIDTH + taps[None, :]
    new = tl.load(x + row * stride + columns, mask=is_channel, other=0.0)
    earlier = tl.load(own + 1, mask=inside & (taps < WIDTH - 1)[None, :] & is_old, other=0.0)
    inputs = tl.where((taps == WIDTH - 1)[None, :], new[:, None], earlier)
    # A number may be read and overwritten by different threads.
    tl.debug_barrier()
    tl.store(own, inputs, mask=inside)
    weights = tl.load(weight + columns[:, None] * WIDTH + taps[None, :], mask=inside, other=0.0)
    total = tl.sum(inputs.to(tl.float32) * weights.to(tl.float32), 1)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(y + row * channels + columns, activated(total, HAS_SILU).to(y.dtype.element_ty), mask=is_channel)
