"""The GPU's attention of a row or two of one token over a paged cache of 16-bit numbers.

A program has one row, one kv head and one split of its keys. Old keys and values, which earlier steps wrote, are asked
for before the kernel before has ended, and go to registers; only the queries and the newest key and value are waited
for. The last program there joins what all left (Dao et al., 2023, Flash-Decoding).
"""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait


@triton.jit
def _places(
    table, keys, position, kv_head, d, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """Return where the numbers of keys lie that are no newer than a position."""
    block = tl.load(table + keys // BLOCK_TOKENS, mask=keys <= position, other=0)
    return ((block * BLOCK_TOKENS + keys % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM + d


@triton.jit(do_not_specialize=["table_stride"])
def few_rows_kernel(
    q,
    k_cache,
    v_cache,
    rows,
    tables,
    out,
    parts,
    sums,
    arrived,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend by program (row, kv head, split); `rows` as those of `decode_attention_kernel`.

    `parts` is float32 [rows, kv heads, splits, BLOCK_G, BLOCK_D]; `sums` has maxima and sums of exponents to the base
    2, [rows, kv heads, splits, BLOCK_G, 2], and `scale` the change of base. `arrived` is int32 [rows, kv heads]: zeros,
    and zeros again in the end.
    """
    let_begin(OVERLAPS)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(rows + row * 4 + 1).to(tl.int32)
    table = tables + tl.load(rows + row * 4 + 3) * table_stride
    at = (tl.load(rows + row * 4) * KV_HEADS + kv_head) * GROUP
    num_tiles = position // BLOCK_N + 1
    share = tl.cdiv(num_tiles, NUM_SPLITS)
    used = tl.cdiv(num_tiles, share)
    low = split * share
    high = tl.minimum(num_tiles, low + share)
    if (low >= num_tiles) | (tl.load(rows + row * 4 + 2) == 0):
        # A kernel none of whose programs waited would have ended before the one before it.
        wait(OVERLAPS)
        return
    g, n = tl.arange(0, BLOCK_G)[:, None, None], tl.arange(0, BLOCK_N)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    has_dim = d < HEAD_DIM
    is_query = (g < GROUP) & has_dim
    keys = low * BLOCK_N + n
    place = _places(table, keys, position, kv_head, d, KV_HEADS, HEAD_DIM, BLOCK_TOKENS)
    newest = _places(table, position, position, kv_head, d, KV_HEADS, HEAD_DIM, BLOCK_TOKENS)
    k = tl.load(k_cache + place, mask=(keys < position) & has_dim, other=0.0)
    v = tl.load(v_cache + place, mask=(keys < position) & has_dim, other=0.0)
    wait(OVERLAPS)
    queries = tl.load(q + (at + g) * HEAD_DIM + d, mask=is_query, other=0.0).to(tl.float32) * scale
    if low * BLOCK_N + BLOCK_N > position:
        k = tl.where(keys == position, tl.load(k_cache + newest, mask=has_dim, other=0.0), k)
        v = tl.where(keys == position, tl.load(v_cache + newest, mask=has_dim, other=0.0), v)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(low, high):
        scores = tl.sum(queries * k.to(tl.float32), axis=2)
        is_key = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :] <= position
        # Every tile has a key that is seen: maxima are finite.
        scores = tl.where(is_key, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(weights, axis=1)
        mixed = mixed * faded[:, None] + tl.sum(weights[:, :, None] * v.to(tl.float32), axis=1)
        highest = higher
        if tile + 1 < high:
            keys += BLOCK_N
            place = _places(table, keys, position, kv_head, d, KV_HEADS, HEAD_DIM, BLOCK_TOKENS)
            k = tl.load(k_cache + place, mask=(keys <= position) & has_dim, other=0.0)
            v = tl.load(v_cache + place, mask=(keys <= position) & has_dim, other=0.0)
    head, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    target = out + (at + head)[:, None] * HEAD_DIM + dim[None, :]
    is_target = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    if used == 1:
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_target)
        return
    one = row * KV_HEADS + kv_head
    left = (one * NUM_SPLITS + split) * BLOCK_G + head
    tl.store(parts + left[:, None] * BLOCK_D + dim[None, :], mixed)
    tl.store(sums + left * 2, highest)
    tl.store(sums + left * 2 + 1, total)
    # All of the program has written before it says so, and what it says is seen after what it wrote.
    tl.debug_barrier()
    if tl.atomic_add(arrived + one, 1, sem="acq_rel") < used - 1:
        return
    p = tl.arange(0, NUM_SPLITS)[:, None, None]
    lefts = (one * NUM_SPLITS + p) * BLOCK_G + tl.arange(0, BLOCK_G)[None, :, None]
    found = tl.load(parts + lefts * BLOCK_D + d, mask=p < used, other=0.0, cache_modifier=".cg")
    peaks = tl.load(sums + lefts * 2, mask=p < used, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums + lefts * 2 + 1, mask=p < used, other=0.0, cache_modifier=".cg")
    weights = tl.exp2(peaks - tl.max(peaks, axis=0, keep_dims=True))
    joined = tl.sum(weights * found, axis=0) / tl.sum(weights * totals, axis=0)
    tl.store(target, joined.to(out.dtype.element_ty), mask=is_target)
    tl.store(arrived + one, 0)
