"""GPU attention of single-token (decode) rows over a paged cache, splitting the whole batch's keys evenly.

Context lengths vary and are known only on the device. So the key tiles of all rows and kv heads are laid end to end,
and each concurrently running program takes an equal share (Stream-K: Osama et al., 2023, arXiv 2301.03598, for
products). A share may end one row and begin the next.

    tiles     | row 0, kv head 0 | row 0, kv head 1 | row 1, kv head 0 ...
    programs  |     0     |     1     |     2     |     3  ...

If a row's tiles lie in several shares, each program stores its partial result, and the last one to finish combines them
(Flash-Decoding: Dao et al., 2023).
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn

RESERVE = tl.constexpr(16.0)
"""Softmax weights in float16 are multiplied by value spans divided by this, which allows spans up to a million."""


@triton.jit
def _tile_of(cache, head, is_key, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IN_WORDS: tl.constexpr):
    """Load heads [keys, dims] of a cache; if IN_WORDS, four 8-bit elements each.

    The compiler would take a tile of bytes apart as soon as it is asked for, so that the loop waits for each tile.
    """
    SHARE: tl.constexpr = 4 if IN_WORDS else 1
    if IN_WORDS:
        cache = cache.to(tl.pointer_type(tl.int32), bitcast=True)
    d = tl.arange(0, BLOCK_D // SHARE)
    is_number = is_key[:, None]
    if BLOCK_D != HEAD_DIM:
        is_number = is_number & (d < HEAD_DIM // SHARE)[None, :]
    return tl.load(cache + head.to(tl.int64)[:, None] * (HEAD_DIM // SHARE) + d[None, :], mask=is_number, other=0.0)


@triton.jit
def _numbers_of(tile, IS_INT8: tl.constexpr, dtype: tl.constexpr):
    """Return the elements of a tile in `dtype`.

    Those of words become float16, which represents them exactly, by their bits, as conversions are slow. They are in
    the order 0, 2, 1, 3, because pairs of them are computed at once; FP8 ones lack a factor, `_missing_factor`.
    """
    if tile.dtype == tl.int32:
        if IS_INT8:
            # The bits of 1024 + 128 + number.
            even = (tile & 0x00FF00FF) ^ 0x64806480
            odd = ((tile >> 8) & 0x00FF00FF) ^ 0x64806480
        else:
            # The sign, and exponent and mantissa moved to those of float16.
            even = ((tile << 8) & -0x7FFF8000) | (((tile << 8) & 0x7F007F00) >> 1)
            odd = (tile & -0x7FFF8000) | ((tile & 0x7F007F00) >> 1)
        first = tl.interleave(even.to(tl.int16), odd.to(tl.int16))
        second = tl.interleave((even >> 16).to(tl.int16), (odd >> 16).to(tl.int16))
        bits = tl.interleave(first, second).to(tl.float16, bitcast=True)
        numbers = bits - 1152.0 if IS_INT8 else bits
    else:
        numbers = tile.to(dtype)
    return numbers


@triton.jit
def _turned(d):
    """Return indices within a head in the order of `_numbers_of` words."""
    return d // 4 * 4 + d % 2 * 2 + d // 2 % 2


@triton.jit
def _capped(scores, softcap):
    """Return softcap * tanh(scores / softcap), through an exponential that cannot overflow."""
    small = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(scores / softcap))
    sign = tl.where(scores < 0, -1.0, 1.0)
    return softcap * sign * (1.0 - small) / (1.0 + small)


@triton.jit
def _missing_factor(element: tl.constexpr):
    """Return by what `_numbers_of` words of this type are too small: the exponent of float16 has a bias of 15."""
    factor: tl.constexpr = 1.0 if element == tl.int8 else (128.0 if element == tl.float8e4b8 else 256.0)
    return factor


@triton.jit
def _begun(sinks, is_query, is_first, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the initial maximum and sum: those of the sinks, if any, for the program with a row's first tile."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_query, other=0.0)
        highest = tl.where(is_first, sink * 1.4426950408889634, highest)
        total = tl.where(is_first, 1.0, total)
    return highest, total


@triton.jit
def _join(
    parts,
    sums,
    out,
    first,
    last,
    is_begun_late,
    at,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Combine the partial results of programs `first` to `last` for one kv head, BLOCK_P at a time, in fixed order."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for low in range(first, last + 1, BLOCK_P):
        program = low + tl.arange(0, BLOCK_P)
        is_part = (program <= last)[:, None] & (g < GROUP)[None, :]
        slot = program * 2 + ((program == first) & is_begun_late).to(tl.int32)
        place = slot[:, None] * GROUP + g[None, :]
        peaks = tl.load(sums + place * 2, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(sums + place * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
        source = parts + place[:, :, None] * BLOCK_D + d[None, None, :]
        found = tl.load(source, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(peaks, axis=0))
        # Padding heads have only minus infinity, whose difference would be NaN.
        safe = tl.where(g < GROUP, higher, 0.0)
        weights = tl.exp2(peaks - safe[None, :])
        faded = tl.exp2(highest - safe)
        total = total * faded + tl.sum(weights * totals, axis=0)
        mixed = mixed * faded[:, None] + tl.sum(found * weights[:, :, None], axis=0)
        highest = higher
    target = out + (at + g)[:, None] * HEAD_DIM + d[None, :]
    is_target = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_target)


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def decode_attention_kernel(
    q,
    k_cache,
    v_cache,
    k_spans,
    v_spans,
    sinks,
    rows,
    tables,
    out,
    parts,
    sums,
    arrived,
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend over the program's share of all tiles.

    `rows` are [first token, position, number of tokens, row of `tables`], int64; a row of no tokens is skipped. A
    program stores partial results in two slots: the first for the row it begins with, the second for the row it ends
    with. `parts` is float32 [programs, 2, group, BLOCK_D]; `sums` [programs, 2, group, 2] has maxima and sums, of
    base-2 exponents. `arrived` [programs] int32 counts, at the first program of a row, how many of the row's programs
    have stored their part; it is zero before and after the launch. In an IS_QUANTIZED cache, elements are in units of
    span * `unit`. A token has room for CACHE_HEADS in the cache and SPAN_HEADS spans. If HAS_SINKS, a row's first
    tile starts from one more score, of `sinks` float32 [HEADS], with a value of zeros.
    """
    take_turn(OVERLAPS)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    IS_INT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    IS_SHORT: tl.constexpr = IS_QUANTIZED and q.dtype.element_ty != tl.float32
    # Keys in FP8 become float16 in one instruction for two, without being taken apart.
    K_IN_WORDS: tl.constexpr = IS_SHORT and IS_INT8
    # 8-bit elements convert to float16 in one instruction, to bfloat16 in several.
    dtype: tl.constexpr = tl.float16 if IS_SHORT else q.dtype.element_ty
    program = tl.program_id(0)
    r = tl.arange(0, BLOCK_ROWS)
    is_row = r < num_rows
    of_row = tl.load(rows + r * 4 + 1, mask=is_row, other=0).to(tl.int32)
    is_row = is_row & (tl.load(rows + r * 4 + 2, mask=is_row, other=0) > 0)
    unseen = of_row * 0
    if WINDOW > 0:
        unseen = tl.maximum(of_row - WINDOW + 1, 0) // BLOCK_N
    tiles = tl.where(is_row, of_row // BLOCK_N + 1 - unseen, 0)
    ends = tl.cumsum(tiles, axis=0) * KV_HEADS
    num_tiles = tl.sum(tiles, axis=0) * KV_HEADS
    share = tl.cdiv(num_tiles, tl.num_programs(0))
    tile = program * share
    stop = tl.minimum(num_tiles, tile + share)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_query, has_dim = m < GROUP, d < HEAD_DIM
    key_d, value_d = _turned(d) if K_IN_WORDS else d, _turned(d) if IS_SHORT else d
    slot = program * 2
    while tile < stop:
        row = tl.sum((ends <= tile).to(tl.int32), axis=0)
        count = tl.sum(tl.where(r == row, tiles, 0), axis=0)
        before = tl.sum(tl.where(r < row, tiles, 0), axis=0) * KV_HEADS
        kv_head = (tile - before) // count
        whole = before + kv_head * count  # the first tile of this row and head
        low = tile - whole
        high = tl.minimum(count, low + stop - tile)
        position = tl.load(rows + row * 4 + 1).to(tl.int32)
        table = tables + tl.load(rows + row * 4 + 3) * table_stride
        at = tl.load(rows + row * 4) * HEADS + kv_head * GROUP
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        # Everything is transposed, keys times queries: the left operand of matrix instructions is the long one.
        source = q + (at + m)[None, :] * HEAD_DIM + key_d[:, None]
        queries = tl.load(source, mask=is_query[None, :] & has_dim[:, None], other=0.0)
        if IS_SHORT:
            # Scaled first: values beyond the range of float16 would not make usable scores.
            queries = (queries.to(tl.float32) * scale).to(dtype)
        highest, total = _begun(sinks + kv_head * GROUP + m, is_query, low == 0, HAS_SINKS, BLOCK_M)
        mixed = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
        for start in range(begin + low * BLOCK_N, begin + high * BLOCK_N, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            is_key = keys <= position
            block = tl.load(table + keys // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int32)
            token = block * BLOCK_TOKENS + keys % BLOCK_TOKENS
            held = token * CACHE_HEADS + kv_head
            # Slots past the row's own tokens were never written and may be NaN.
            k = _tile_of(k_cache, held, is_key, HEAD_DIM, BLOCK_D, K_IN_WORDS)
            if IS_QUANTIZED:
                place = token * SPAN_HEADS + kv_head
                k_span = tl.load(k_spans + place, mask=is_key, other=0.0) * unit
                v_span = tl.load(v_spans + place, mask=is_key, other=0.0) / RESERVE
            v = _tile_of(v_cache, held, is_key, HEAD_DIM, BLOCK_D, IS_SHORT)
            scores = tl.dot(_numbers_of(k, IS_INT8, dtype), queries, input_precision="ieee")
            if IS_QUANTIZED:
                scores *= k_span[:, None]
            if not IS_SHORT:
                scores *= scale
            if HAS_SOFTCAP:
                scores = _capped(scores, softcap)
            is_seen = is_key
            if WINDOW > 0:
                is_seen = is_seen & (keys > position - WINDOW)
            # Every tile has at least one visible key, so maxima are finite.
            scores = tl.where(is_seen[:, None], scores * LOG2_E, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=0))
            weights = tl.exp2(scores - higher[None, :])
            faded = tl.exp2(highest - higher)
            total = total * faded + tl.sum(weights, axis=0)
            if IS_QUANTIZED:
                weights *= v_span[:, None]
            values = tl.trans(_numbers_of(v, IS_INT8, dtype))
            mixed = tl.dot(values, weights.to(dtype), mixed * faded[None, :], input_precision="ieee")
            highest = higher
        if IS_QUANTIZED:
            mixed *= unit * RESERVE * (_missing_factor(k_cache.dtype.element_ty) if IS_SHORT else 1.0)
        if high - low == count:
            target = out + (at + m)[None, :] * HEAD_DIM + value_d[:, None]
            is_target = is_query[None, :] & has_dim[:, None]
            tl.store(target, (mixed / total[None, :]).to(out.dtype.element_ty), mask=is_target)
        else:
            place = slot * GROUP + m
            tl.store(parts + place[None, :] * BLOCK_D + value_d[:, None], mixed, mask=is_query[None, :])
            tl.store(sums + place * 2, highest, mask=is_query)
            tl.store(sums + place * 2 + 1, total, mask=is_query)
            # The barrier makes all threads write before the counter is incremented; acq_rel orders it after the writes.
            tl.debug_barrier()
            first, last = whole // share, (whole + count - 1) // share
            if tl.atomic_add(arrived + first, 1, sem="acq_rel") == last - first:
                is_begun_late = whole % share != 0
                _join(parts, sums, out, first, last, is_begun_late, at, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_P)
                tl.store(arrived + first, 0)
        slot = program * 2 + 1
        tile += high - low
