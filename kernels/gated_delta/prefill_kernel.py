"""GPU kernels for the gated delta rule on rows of many tokens, in chunks of CHUNK tokens.

With G the cumulative sum of g in a chunk, and norms folded into k and q, the values that the rule adds in a chunk that
starts from state S are

    V' = U - W S,    U = T diag(beta) V,    W = T diag(beta exp(G)) K,
    T = (I + A)^-1,    A[i, j] = beta[i] (k[i] . k[j]) exp(G[i] - G[j])  for j < i, else 0

and with them

    o = diag(exp(G)) Q S + P V',    P[i, j] = (q[i] . k[j]) exp(G[i] - G[j])  for j <= i, else 0

The next chunk starts from exp(G[last]) S + (diag(exp(G[last] - G)) K)^T V'. The first kernel computes U, W and P of all
chunks at once; the second one goes from chunk to chunk.

Source: Yang et al., 2024, Gated Delta Networks, arXiv 2412.06464, section 3.3.
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def inverse(lower, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)^-1 of a strictly lower triangular matrix [CHUNK, CHUNK], CHUNK = 2^LEVELS.

    By blocks of 1, 2, 4, ...: if T inverts the diagonal blocks of one size and L is what the blocks of twice that size
    have below them, T - T L T inverts the latter. Unlike a series in powers of `lower`, no large terms cancel.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # Blocks of 1 are their own inverses, so that of 2 takes no product.
    found = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        is_below = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level))
        part = tl.dot(found, tl.where(is_below, lower, 0.0), input_precision=PRECISION)
        found -= tl.dot(part, found, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=["tokens"])
def gated_delta_chunk_kernel(
    q,
    k,
    v,
    g,
    beta,
    u,
    w,
    p,
    fades,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    eps,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (chunk, head, row) computes its U, W and P, BLOCK dimensions at a time.

    `u` is [rows, tokens, HEADS, VALUE_DIM], `w` [rows, tokens, HEADS, KEY_DIM], `p` [rows, tokens, HEADS, CHUNK]. The
    second kernel multiplies by K and Q as they are; `fades` [rows, tokens, HEADS, 3], float32, are what their rows are
    to be multiplied by, norms included, and in a chunk's first token what its state is.
    """
    take_turn(OVERLAPS)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    first, count = row * tokens + start, tokens - start
    at, some = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    is_token = at < count
    key_head = head // (HEADS // KEY_HEADS)
    dtype = k.dtype.element_ty
    k_at = k + (first + at)[:, None] * k_stride + key_head * KEY_DIM + some[None, :]
    q_at = q + (first + at)[:, None] * q_stride + key_head * KEY_DIM + some[None, :]
    v_at = v + (first + at)[:, None] * v_stride + head * VALUE_DIM + some[None, :]
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    k_squares, q_squares = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for column in range(0, KEY_DIM, BLOCK):
        inside = is_token[:, None] & (column + some < KEY_DIM)[None, :]
        keys = tl.load(k_at + column, mask=inside, other=0.0)
        queries = tl.load(q_at + column, mask=inside, other=0.0)
        kk = tl.dot(keys, tl.trans(keys), kk, input_precision=PRECISION)
        qk = tl.dot(queries, tl.trans(keys), qk, input_precision=PRECISION)
        k_squares += tl.sum(keys.to(tl.float32) * keys.to(tl.float32), 1)
        q_squares += tl.sum(queries.to(tl.float32) * queries.to(tl.float32), 1)
    k_norms, q_norms = tl.rsqrt(k_squares + eps), tl.rsqrt(q_squares + eps) * scale
    flat = (first + at) * HEADS + head
    total = tl.cumsum(tl.load(g + flat, mask=is_token, other=0.0), 0)
    last = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
    tl.store(fades + flat * 3, tl.exp(total) * q_norms, mask=is_token)
    tl.store(fades + flat * 3 + 1, tl.exp(last - total) * k_norms, mask=is_token)
    tl.store(fades + (first * HEADS + head) * 3 + 2, tl.exp(last))
    strength = tl.load(beta + flat, mask=is_token, other=0.0)
    is_seen = at[:, None] >= at[None, :]
    # Masked before the exponential, which would overflow above the diagonal.
    fade = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], -float("inf"))) * k_norms[None, :]
    p_at = p + flat[:, None] * CHUNK + at[None, :]
    tl.store(p_at, (qk * fade * q_norms[:, None]).to(dtype), mask=is_token[:, None])
    lower = tl.where(at[:, None] > at[None, :], kk * fade * (strength * k_norms)[:, None], 0.0)
    solved = inverse(lower, CHUNK, LEVELS, PRECISION) * strength[None, :]
    of_values = solved.to(dtype)
    for column in range(0, VALUE_DIM, BLOCK):
        inside = is_token[:, None] & (column + some < VALUE_DIM)[None, :]
        part = tl.dot(of_values, tl.load(v_at + column, mask=inside, other=0.0), input_precision=PRECISION)
        u_at = u + flat[:, None] * VALUE_DIM + column + some[None, :]
        tl.store(u_at, part.to(dtype), mask=inside)
    of_keys = (solved * (tl.exp(total) * k_norms)[None, :]).to(dtype)
    for column in range(0, KEY_DIM, BLOCK):
        inside = is_token[:, None] & (column + some < KEY_DIM)[None, :]
        part = tl.dot(of_keys, tl.load(k_at + column, mask=inside, other=0.0), input_precision=PRECISION)
        w_at = w + flat[:, None] * KEY_DIM + column + some[None, :]
        tl.store(w_at, part.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def gated_delta_scan_kernel(
    q,
    k,
    u,
    w,
    p,
    fades,
    states,
    out,
    tokens,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, head, row) takes BLOCK_V columns of a head's state through all chunks of a row."""
    take_turn(OVERLAPS)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    key_head = head // (HEADS // KEY_HEADS)
    dtype = k.dtype.element_ty
    own = states + (row * HEADS + head) * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(own, mask=is_key[:, None] & is_value[None, :], other=0.0)
    for start in range(0, tokens, CHUNK):
        token = row * tokens + start + at
        is_token = at < tokens - start
        are_keys, are_values = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        flat = token * HEADS + head
        moved = tl.load(w + flat[:, None] * KEY_DIM + keys[None, :], mask=are_keys, other=0.0)
        added = tl.load(u + flat[:, None] * VALUE_DIM + values[None, :], mask=are_values, other=0.0).to(tl.float32)
        q_fades = tl.load(fades + flat * 3, mask=is_token, other=0.0)
        k_fades = tl.load(fades + flat * 3 + 1, mask=is_token, other=0.0)
        kept = tl.load(fades + ((row * tokens + start) * HEADS + head) * 3 + 2)
        narrow = state.to(dtype)
        added -= tl.dot(moved, narrow, input_precision=PRECISION)
        query = tl.load(q + token[:, None] * q_stride + key_head * KEY_DIM + keys[None, :], mask=are_keys, other=0.0)
        found = tl.dot(query, narrow, input_precision=PRECISION) * q_fades[:, None]
        mixed = tl.load(p + flat[:, None] * CHUNK + at[None, :], mask=is_token[:, None], other=0.0)
        found = tl.dot(mixed, added.to(dtype), found, input_precision=PRECISION)
        tl.store(out + flat[:, None] * VALUE_DIM + values[None, :], found.to(dtype), mask=are_values)
        key = tl.load(k + token[:, None] * k_stride + key_head * KEY_DIM + keys[None, :], mask=are_keys, other=0.0)
        added = (added * k_fades[:, None]).to(dtype)
        state = tl.dot(tl.trans(key), added, state * kept, input_precision=PRECISION)
    tl.store(own, state, mask=is_key[:, None] & is_value[None, :])
