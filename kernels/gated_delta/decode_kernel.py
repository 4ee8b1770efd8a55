"""GPU kernel for the gated delta rule on rows of one token."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def gated_delta_decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    states,
    places,
    are_new,
    out,
    q_stride,
    k_stride,
    v_stride,
    eps,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_HELD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, head, row) computes BLOCK_V values of a head and reads and writes their columns of its state once.

    If IS_HELD, row i's state is that of `places[i]`, and zeros if `are_new[i]`. `g` and `beta` are [rows, HEADS].
    """
    take_turn(OVERLAPS)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    inside = is_key[:, None] & is_value[None, :]
    place, is_old = row, True
    if IS_HELD:
        place = tl.load(places + row)
        is_old = tl.load(are_new + row) == 0
    own = states + (place * HEADS + head) * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(own, mask=inside & is_old, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.load(k + row * k_stride + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_stride + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + head * VALUE_DIM + values, mask=is_value, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    state *= tl.exp(tl.load(g + row * HEADS + head))
    told = tl.sum(state * key[:, None], 0)
    state += key[:, None] * (tl.load(beta + row * HEADS + head) * (value - told))[None, :]
    tl.store(own, state, mask=inside)
    found = tl.sum(state * query[:, None], 0)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + values, found.to(out.dtype.element_ty), mask=is_value)
