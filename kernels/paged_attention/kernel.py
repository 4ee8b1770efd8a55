"""The GPU's attention over a paged cache: prefill chunks and decodes by one kernel, decodes split over the context.

A program holds BLOCK_Q queries of one row for all GROUP query heads that share a kv head, as BLOCK_M rows of a tile. It
walks over the keys in tiles of BLOCK_N with a running maximum and sum (Dao et al., 2022, FlashAttention, arXiv
2205.14135, algorithm 1). With NUM_SPLITS above 1 the context is cut among as many programs, whose partial results
`combine_kernel` joins (Dao et al., 2023, Flash-Decoding).
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn
from kernels.search import place_of


@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_wanted", "least_keys"])
def paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    k_spans,
    v_spans,
    rows,
    tables,
    out,
    sums,
    num_rows,
    table_stride,
    num_wanted,
    least_keys,
    scale,
    unit,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_DECODE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of queries, kv head, split).

    Rows are [first token, position, number of tokens, row of `tables`], int64; a row of no tokens is skipped. With
    NUM_SPLITS above 1 `out` is float32 [tokens, heads, splits, BLOCK_D] and `sums` [tokens, heads, splits, 2] takes
    maxima and sums, both of exponents to the base 2; a context is cut into `num_wanted` splits, or into more of
    `least_keys` each, and a split that is left without keys has a maximum of minus infinity and no output. In a cache
    that IS_QUANTIZED keys and values are in units of what they span times `unit`, which `scale` has in it for the keys.
    """
    take_turn(OVERLAPS)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        row = tile
        within = 0
        first = tl.load(rows + row * 4)
    else:
        # The end of a long prompt has the most keys to look at: begun last, it would be waited for.
        row, first, within = place_of(rows, 4, num_rows, tl.num_programs(0) - 1 - tile, BLOCK_Q)
    position = tl.load(rows + row * 4 + 1)
    count = tl.load(rows + row * 4 + 2)
    table = tables + tl.load(rows + row * 4 + 3) * table_stride
    if within * BLOCK_Q >= count:
        return
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = within * BLOCK_Q + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_query = (m < BLOCK_Q * GROUP) & (query < count)
    has_dim = d < HEAD_DIM
    at = (first + query) * HEADS + head
    queries = tl.load(q + at[:, None] * HEAD_DIM + d[None, :], mask=is_query[:, None] & has_dim[None, :], other=0.0)
    own = position + query
    end = position + tl.minimum((within + 1) * BLOCK_Q, count)
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(begin, position + within * BLOCK_Q - WINDOW + 1) // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        enough = tl.minimum(tl.cdiv(num_tiles, num_wanted), tl.cdiv(least_keys, BLOCK_N))
        share = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), enough) * BLOCK_N
        begin += split * share
        stop = tl.minimum(end, begin + share)
    else:
        stop = end
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < stop
        block = tl.load(table + keys // BLOCK_TOKENS, mask=is_key, other=0)
        slot = block * BLOCK_TOKENS + keys % BLOCK_TOKENS
        source = slot * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        # What lies past the row's own tokens was never written, and may be NaN.
        k = tl.load(k_cache + source[None, :] + d[:, None], mask=is_key[None, :] & has_dim[:, None], other=0.0)
        v = tl.load(v_cache + source[:, None] + d[None, :], mask=is_key[:, None] & has_dim[None, :], other=0.0)
        scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * scale
        if IS_QUANTIZED:
            scores *= tl.load(k_spans + slot * KV_HEADS + kv_head, mask=is_key, other=0.0)[None, :]
        if HAS_SOFTCAP:
            # tanh by an exponential that cannot overflow.
            small = tl.exp2(-2.0 * LOG2_E * tl.abs(scores / softcap))
            sign = tl.where(scores < 0, -1.0, 1.0)
            scores = softcap * sign * (1.0 - small) / (1.0 + small)
        is_seen = (keys[None, :] <= own[:, None]) & is_key[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > own[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # A query may see no key of a tile, nor any before it.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        faded = tl.exp2(highest - safe)
        total = total * faded + tl.sum(weights, axis=1)
        if IS_QUANTIZED:
            weights *= tl.load(v_spans + slot * KV_HEADS + kv_head, mask=is_key, other=0.0)[None, :]
        values = v.to(queries.dtype)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = higher
    if IS_QUANTIZED:
        mixed *= unit
    if NUM_SPLITS > 1:
        part = at * NUM_SPLITS + split
        tl.store(out + part[:, None] * BLOCK_D + d[None, :], mixed, mask=is_query[:, None] & (begin < stop))
        tl.store(sums + part * 2, highest, mask=is_query)
        tl.store(sums + part * 2 + 1, total, mask=is_query)
    else:
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_query[:, None] & has_dim[None, :])


@triton.jit
def combine_kernel(
    parts,
    sums,
    rows,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Join the splits of one row's only token; program (row, head)."""
    take_turn(OVERLAPS)
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(rows + row * 4 + 2) == 0:
        return
    at = tl.load(rows + row * 4) * HEADS + head
    split = tl.arange(0, NUM_SPLITS)
    d = tl.arange(0, BLOCK_D)
    highest = tl.load(sums + (at * NUM_SPLITS + split) * 2)
    total = tl.load(sums + (at * NUM_SPLITS + split) * 2 + 1)
    was_there = (highest != float("-inf"))[:, None]
    mixed = tl.load(parts + (at * NUM_SPLITS + split)[:, None] * BLOCK_D + d[None, :], mask=was_there, other=0.0)
    faded = tl.exp2(highest - tl.max(highest, axis=0))
    result = tl.sum(mixed * faded[:, None], axis=0) / tl.sum(total * faded, axis=0)
    tl.store(out + at * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
