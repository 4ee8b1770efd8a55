"""GPU attention of multi-token (prefill) rows over a paged cache, which holds the rows' whole contexts.

A program holds BLOCK_Q queries of one row for all GROUP query heads that share a kv head, as BLOCK_M rows of a tile. It
iterates over the keys in tiles of BLOCK_N with a running maximum and sum (Dao et al., 2022, FlashAttention, arXiv
2205.14135, algorithm 1). Nearly all of the time goes into that loop, so it does little besides its two products: only
tiles that some query sees partially are masked, scale and base are one multiplication, and slots are looked up one tile
before their keys are loaded, because dependent loads halve Triton's prefetch distance.
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn
from kernels.paged_attention.search import place_of


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def prefill_attention_kernel(
    q,
    k_cache,
    v_cache,
    k_spans,
    v_spans,
    sinks,
    rows,
    tables,
    out,
    num_rows,
    table_stride,
    scale,
    unit,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    SPAN_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of queries, kv head).

    Rows are [first token, position, number of tokens, row of `tables`], int64; a row of no tokens is skipped. In an
    IS_QUANTIZED cache, elements are in units of span * `unit`; for keys, `scale` includes `unit`. A token has
    room for CACHE_HEADS in the cache and SPAN_HEADS spans. If HAS_SINKS, each of
    `sinks` float32 [HEADS] is one more score, with a value of zeros, that the softmax starts from.
    """
    take_turn(OVERLAPS)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    # The end of a long prompt has the most keys, so it starts first: started last, it would prolong the launch.
    row, first, within = place_of(rows, 4, num_rows, tl.num_programs(0) - 1 - tile, BLOCK_Q)
    begun = within.to(tl.int32) * BLOCK_Q
    count = tl.load(rows + row * 4 + 2).to(tl.int32)
    if begun >= count:
        return
    least = tl.load(rows + row * 4 + 1).to(tl.int32) + begun
    num_queries = tl.minimum(count - begun, BLOCK_Q)
    stop = least + num_queries
    table = tables + tl.load(rows + row * 4 + 3) * table_stride
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    own = least + m // GROUP
    # A single 64-bit offset, because values that live across the loop cost registers, which are scarce.
    corner = (first + begun) * (HEADS * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM)
    at = (m // GROUP * HEADS + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    is_asked = (m < num_queries * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + corner + at, mask=is_asked, other=0.0)
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    k_spans += kv_head
    v_spans += kv_head
    # All queries see all keys of the tiles that start in left .. right - 1.
    right = (least + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(least - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        left = stop - WINDOW
    # Base-2 exponents are `factor` times the scores, up to a constant per query.
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        steepness = 2.0 * LOG2_E * scale / softcap
        factor = 2.0 * LOG2_E * softcap
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + m % GROUP)
        if HAS_SOFTCAP:
            sink -= softcap
        highest = sink * LOG2_E
        total += 1.0
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slots = slots_of(table, tl.minimum(begin + n, stop - 1), BLOCK_TOKENS)
    for start in range(begin, stop, BLOCK_N):
        k = vectors_of(k_cache, slots, d, CACHE_HEADS, HEAD_DIM, BLOCK_D)
        v = vectors_of(v_cache, slots, d, CACHE_HEADS, HEAD_DIM, BLOCK_D)
        if IS_QUANTIZED:
            k_span = tl.load(k_spans + slots * SPAN_HEADS)
            v_span = tl.load(v_spans + slots * SPAN_HEADS)
        # Slots past the row's own tokens were never written and may be NaN: the last token stands in for them.
        slots = slots_of(table, tl.minimum(start + BLOCK_N + n, stop - 1), BLOCK_TOKENS)
        scores = tl.dot(queries, tl.trans(_number(k, queries.dtype)), input_precision="ieee")
        if IS_QUANTIZED:
            scores *= k_span[None, :]
        if HAS_SOFTCAP:
            # softcap * tanh(s / softcap) is softcap - 2 * softcap / (1 + exp(2 * s / softcap)).
            scores = -1.0 / (1.0 + tl.exp2(scores * steepness))
        is_partly_seen = start >= right
        if WINDOW > 0:
            is_partly_seen = is_partly_seen | (start < left)
        if is_partly_seen:
            keys = start + n
            is_seen = keys[None, :] <= own[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (keys[None, :] > own[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        safe = higher
        if WINDOW > 0:
            # A query may have seen no key in this tile or any earlier one.
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - safe[:, None])
        faded = tl.exp2(highest - safe)
        total = total * faded + tl.sum(weights, axis=1)
        if IS_QUANTIZED:
            weights *= v_span[None, :]
        values = _number(v, queries.dtype)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None], input_precision="ieee")
        highest = higher
    if IS_QUANTIZED:
        mixed *= unit
    tl.store(out + corner + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_asked)


@triton.jit
def _number(held, dtype: tl.constexpr):
    """Return elements of the cache in `dtype`."""
    if held.dtype.is_fp8():
        # The compiler's own way, through float16, takes a slow instruction for each number.
        held = held.to(tl.float32)
    return held.to(dtype)


@triton.jit
def slots_of(table, keys, BLOCK_TOKENS: tl.constexpr):
    """Return the cache slots of keys: block * BLOCK_TOKENS + offset."""
    return tl.load(table + keys // BLOCK_TOKENS).to(tl.int32) * BLOCK_TOKENS + keys % BLOCK_TOKENS


@triton.jit
def vectors_of(cache, slots, d, CACHE_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys or values of one head, [slots, BLOCK_D]."""
    at = cache + slots.to(tl.int64)[:, None] * (CACHE_HEADS * HEAD_DIM) + d[None, :]
    return tl.load(at) if HEAD_DIM == BLOCK_D else tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
