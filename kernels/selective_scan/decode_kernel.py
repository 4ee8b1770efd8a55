"""GPU kernel for the selective scan of rows of one token."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def selective_decode_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    places,
    are_new,
    y,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HAS_D: tl.constexpr,
    IS_HELD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, head, row) computes BLOCK_P outputs of a head, and reads and writes their rows of its state once.

    If IS_HELD, row i's state is that of `places[i]`, and zeros if `are_new[i]`. `dt` is [rows, HEADS].
    """
    take_turn(OVERLAPS)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    outputs, columns = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    is_output, is_column = outputs < HEAD_DIM, columns < STATE_DIM
    inside = is_output[:, None] & is_column[None, :]
    place, is_old = row, True
    if IS_HELD:
        place = tl.load(places + row)
        is_old = tl.load(are_new + row) == 0
    own = states + (place * HEADS + head) * HEAD_DIM * STATE_DIM + outputs[:, None] * STATE_DIM + columns[None, :]
    state = tl.load(own, mask=inside & is_old, other=0.0)
    in_group = head // (HEADS // GROUPS) * STATE_DIM + columns
    step = tl.load(dt + row * HEADS + head)
    taken = tl.load(b + row * b_stride + in_group, mask=is_column, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_stride + in_group, mask=is_column, other=0.0).to(tl.float32)
    inputs = tl.load(x + row * x_stride + head * HEAD_DIM + outputs, mask=is_output, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(a + head) * step) + (inputs * step)[:, None] * taken[None, :]
    # Of few numbers, every warp has a copy and only one stores it, which must not be before the others have loaded.
    tl.debug_barrier()
    tl.store(own, state, mask=inside)
    found = tl.sum(state * read[None, :], 1)
    if HAS_D:
        found += inputs * tl.load(d + head)
    tl.store(y + (row * HEADS + head) * HEAD_DIM + outputs, found.to(y.dtype.element_ty), mask=is_output)
