"""The GPU's way from a layer's fused product to rotated queries and a written cache, in one pass."""

import triton
import triton.language as tl


@triton.jit
def _normed(low, high, weight, lanes, inside, half, eps):
    """Norm heads given as their two halves [heads, half]; returns both as float32, rounded as the dtype rounds."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
    scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
    gain_low = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)[None, :]
    gain_high = tl.load(weight + half + lanes, mask=inside, other=0.0).to(tl.float32)[None, :]
    normed_low = (wide_low * scale).to(low.dtype).to(tl.float32) * gain_low
    normed_high = (wide_high * scale).to(low.dtype).to(tl.float32) * gain_high
    return normed_low.to(low.dtype).to(tl.float32), normed_high.to(low.dtype).to(tl.float32)


@triton.jit
def rope_kv_write_kernel(
    qkv,
    cos_sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    slots,
    q,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (token, part) treats BLOCK_HEADS of the token's heads: queries, then keys, then values.

    A negative slot is that of a token that only fills up a batch: nothing of it is written to the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_HALF)
    inside = lanes < half
    known = (heads < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM + lanes[None, :]
    low = tl.load(source, mask=known, other=0.0)
    high = tl.load(source + half, mask=known, other=0.0)
    is_query = (heads < HEADS)[:, None]
    is_value = (heads >= HEADS + KV_HEADS)[:, None]
    x, y = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        q_low, q_high = _normed(low, high, q_norm, lanes, inside, half, eps)
        k_low, k_high = _normed(low, high, k_norm, lanes, inside, half, eps)
        x, y = tl.where(is_query, q_low, k_low), tl.where(is_query, q_high, k_high)
    angles = cos_sin + token * 2 * HEAD_DIM + lanes
    cos_low = tl.load(angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(angles + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(angles + HEAD_DIM, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(angles + HEAD_DIM + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    rotated_low = (x * cos_low - y * sin_low).to(low.dtype)
    rotated_high = (y * cos_high + x * sin_high).to(low.dtype)
    to_query = known & is_query
    target = q + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(target, rotated_low, mask=to_query)
    tl.store(target + half, rotated_high, mask=to_query)
    slot = tl.load(slots + token)
    row = slot * (KV_HEADS * HEAD_DIM)
    to_key = known & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None] & (slot >= 0)
    key = k_cache + row + (heads[:, None] - HEADS) * HEAD_DIM + lanes[None, :]
    tl.store(key, rotated_low, mask=to_key)
    tl.store(key + half, rotated_high, mask=to_key)
    to_value = known & is_value & (slot >= 0)
    value = v_cache + row + (heads[:, None] - HEADS - KV_HEADS) * HEAD_DIM + lanes[None, :]
    tl.store(value, low, mask=to_value)
    tl.store(value + half, high, mask=to_value)
