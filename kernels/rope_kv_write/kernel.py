"""GPU kernel that norms and rotates the heads of a layer's QKV projection and writes the KV cache, in one pass."""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait
from kernels.row_quantization.kernel import held, span_of


@triton.jit
def _halves(vector, lanes, shift, inside):
    """Return elements of a head-sized vector and their rotation partners, `shift` further on, as float32 [1, half]."""
    low = tl.load(vector + lanes, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(vector + shift + lanes, mask=inside, other=0.0).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def _normed(low, high, gain_low, gain_high, half, eps, dtype: tl.constexpr):
    """Norm heads given as two halves [heads, half], by gains of `dtype`.

    Returns both halves as float32, rounded to the heads' dtype.
    """
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
    scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
    normed_low = (wide_low * scale).to(dtype).to(tl.float32) * gain_low
    normed_high = (wide_high * scale).to(dtype).to(tl.float32) * gain_high
    return normed_low.to(low.dtype).to(tl.float32), normed_high.to(low.dtype).to(tl.float32)


@triton.jit
def rope_kv_write_kernel(
    qkv,
    cos_sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    k_spans,
    v_spans,
    slots,
    q,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    SPAN_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    NORM_STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (token, part) processes BLOCK_HEADS of the token's heads: queries, then keys, then values.

    A negative slot marks a padding token: nothing of it is written to the cache. A token has room for
    CACHE_HEADS in the cache and SPAN_HEADS spans. NORM_STRIDE is the stride between
    tokens' norm weights, 0 if all share the model's; only those may be loaded before the preceding kernel ends. LIMIT
    is that of `kernels.row_quantization`, 0 if the cache is not quantized.
    """
    let_begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_HALF)
    inside = lanes < half
    shift = half
    if ROTARY_DIM < HEAD_DIM:
        # The rotated pairs are followed by the pairs of the part that does not rotate, likewise in two halves.
        shift = tl.where(lanes < ROTARY_DIM // 2, ROTARY_DIM // 2, half - ROTARY_DIM // 2)
        lanes = tl.where(lanes < ROTARY_DIM // 2, lanes, lanes + ROTARY_DIM // 2)
    known = (heads < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    if NORM_STRIDE > 0:
        wait(OVERLAPS)
    if HAS_NORMS:
        q_gain_low, q_gain_high = _halves(q_norm + token * NORM_STRIDE, lanes, shift, inside)
        k_gain_low, k_gain_high = _halves(k_norm + token * NORM_STRIDE, lanes, shift, inside)
    if NORM_STRIDE == 0:
        wait(OVERLAPS)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM + lanes[None, :]
    low = tl.load(source, mask=known, other=0.0)
    high = tl.load(source + shift, mask=known, other=0.0)
    cos_low, cos_high = _halves(cos_sin + token * 2 * HEAD_DIM, lanes, shift, inside)
    sin_low, sin_high = _halves(cos_sin + token * 2 * HEAD_DIM + HEAD_DIM, lanes, shift, inside)
    slot = tl.load(slots + token)
    is_query = (heads < HEADS)[:, None]
    x, y = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        q_low, q_high = _normed(low, high, q_gain_low, q_gain_high, half, eps, q_norm.dtype.element_ty)
        k_low, k_high = _normed(low, high, k_gain_low, k_gain_high, half, eps, k_norm.dtype.element_ty)
        x, y = tl.where(is_query, q_low, k_low), tl.where(is_query, q_high, k_high)
    rotated_low = (x * cos_low - y * sin_low).to(low.dtype)
    rotated_high = (y * cos_high + x * sin_high).to(low.dtype)
    to_query = known & is_query
    target = q + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(target, rotated_low, mask=to_query)
    tl.store(target + shift, rotated_high, mask=to_query)
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS) & (slot >= 0)
    is_value = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS) & (slot >= 0)
    kept_low = tl.where(is_value[:, None], low, rotated_low)
    kept_high = tl.where(is_value[:, None], high, rotated_high)
    kv_head = (heads - HEADS) % KV_HEADS
    row = slot * CACHE_HEADS + kv_head
    if LIMIT > 0:
        wide_low, wide_high = kept_low.to(tl.float32), kept_high.to(tl.float32)
        low_span, high_span = span_of(wide_low), span_of(wide_high)
        # A head's span: the larger of its halves', NaN if either is.
        span = tl.maximum(low_span, high_span) + (low_span + high_span) * 0.0
        place = slot * SPAN_HEADS + kv_head
        tl.store(k_spans + place, span, mask=is_key)
        tl.store(v_spans + place, span, mask=is_value)
        kept_low = held(wide_low, span[:, None], LIMIT, k_cache.dtype.element_ty)
        kept_high = held(wide_high, span[:, None], LIMIT, k_cache.dtype.element_ty)
    target = row[:, None] * HEAD_DIM + lanes[None, :]
    to_key = is_key[:, None] & inside[None, :]
    tl.store(k_cache + target, kept_low, mask=to_key)
    tl.store(k_cache + target + shift, kept_high, mask=to_key)
    to_value = is_value[:, None] & inside[None, :]
    tl.store(v_cache + target, kept_low, mask=to_value)
    tl.store(v_cache + target + shift, kept_high, mask=to_value)
