"""GPU kernel from a layer's QKV projection to its attention output, for one or two single-token rows, in one pass.

A program has one row, some query heads of one kv head, and one split of the keys. Old keys and values, written by
earlier steps, are loaded into registers before the preceding kernel has finished. Only the projection is waited for:
each program norms and rotates its own queries, which is faster than waiting for a separate kernel. One program writes
the newest key and value to the cache, but they are never read from there.

Little is read, so latency is determined by the number of sequential instructions and barriers. A tile of keys is

    [heads, depth, lanes, elements of a head]        tensors of one head, or one key, have a 1 there

where a lane is a few threads of one warp that share a key. Each lane has its own softmax, and lanes are combined once,
at the end. The last program of a team combines the team's partial results (Flash-Decoding: Dao et al., 2023).
"""

import triton
import triton.language as tl

from kernels.overlap import let_begin, wait

UNSEEN = tl.constexpr(-1e30)
"""The score of a masked key. Finite, so that the difference of two is not NaN."""


@triton.jit
def _kept(
    k_cache,
    v_cache,
    table,
    keys,
    position,
    kv_head,
    d,
    shared,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
):
    """Load keys and values older than `position`, `keys` [1, depth, lanes]; other values are zeros, keys arbitrary."""
    # Without the dimension of a head's elements: with it, a thread would look a block up once for each of its elements.
    block = tl.load(table + keys // BLOCK_TOKENS, mask=keys < position, other=0)[:, :, :, None]
    keys = keys[:, :, :, None]
    place = ((block * BLOCK_TOKENS + keys % BLOCK_TOKENS) * CACHE_HEADS + kv_head) * HEAD_DIM + d
    has_dim = d + shared < HEAD_DIM
    k = tl.load(k_cache + place, mask=has_dim, other=0.0)
    return k, tl.load(v_cache + place, mask=(keys < position) & has_dim, other=0.0)


@triton.jit
def _halves(vector, d, partner, mask):
    """Load elements and their rotation partners."""
    return tl.load(vector + d, mask=mask, other=0.0), tl.load(vector + partner, mask=mask, other=0.0)


@triton.jit
def _rotated(x, y, gain_x, gain_y, cos, sin, is_low, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm and rotate heads `x` with rotation partners `y`, rounded as in `kernels.rope_kv_write`."""
    dtype = x.dtype
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(wide_x * wide_x, axis=3, keep_dims=True) / HEAD_DIM + eps)
        wide_x = ((wide_x * scale).to(dtype).to(tl.float32) * gain_x.to(tl.float32)).to(dtype).to(tl.float32)
        wide_y = ((wide_y * scale).to(dtype).to(tl.float32) * gain_y.to(tl.float32)).to(dtype).to(tl.float32)
    return (wide_x * cos.to(tl.float32) + tl.where(is_low, -wide_y, wide_y) * sin.to(tl.float32)).to(dtype)


@triton.jit
def _both(peak, total, other_peak, other_total):
    """Combine two softmaxes, given by their highest scores and the sums of their weights."""
    higher = tl.maximum(peak, other_peak)
    return higher, total * tl.exp2(peak - higher) + other_total * tl.exp2(other_peak - higher)


@triton.jit
def _join_splits(
    parts,
    sums,
    out,
    one,
    used,
    num_heads,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine the partial results of `used` programs of team `one` into `num_heads` heads from `out` on."""
    head, dim = tl.arange(0, BLOCK_G)[:, None, None], tl.arange(0, BLOCK_D)[None, :, None]
    # Replicated over a head's elements, so that each thread loads the values it uses.
    p = tl.arange(0, NUM_SPLITS)[None, None, :] + dim * 0
    left = one * BLOCK_G + head
    # Loads unused splits too: with a mask, each element would be a separate load.
    found = tl.load(parts + (left * BLOCK_D + dim) * NUM_SPLITS + p, cache_modifier=".cg")
    shares = tl.load(sums + left * NUM_SPLITS + p, cache_modifier=".cg")
    shares = tl.where(p < used, shares, UNSEEN)
    weights = tl.exp2(shares - tl.max(shares, axis=2, keep_dims=True))
    joined = tl.sum(tl.where(p < used, weights * found, 0.0), axis=2, keep_dims=True)
    joined *= 1.0 / tl.sum(weights, axis=2, keep_dims=True)
    is_target = (head < num_heads) & (dim < HEAD_DIM)
    tl.store(out + head * HEAD_DIM + dim, joined.to(out.dtype.element_ty), mask=is_target)


@triton.jit(do_not_specialize=["table_stride"])
def rope_attention_kernel(
    qkv,
    cos_sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    slots,
    rows,
    tables,
    out,
    parts,
    sums,
    arrived,
    table_stride,
    eps,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, team, split) attends for a team: up to BLOCK_G of the GROUP query heads that share a kv head.

    `rows` is as in `decode_attention_kernel`; token i belongs to row i. `parts` is float32 [rows, teams, BLOCK_G,
    BLOCK_D, splits]; `sums` [rows, teams, BLOCK_G, splits] has the base-2 logarithms of the softmax denominators;
    `scale` includes the change of base. A token of the cache has room for CACHE_HEADS. `arrived` is int32 [rows,
    teams], zero before and after the launch.
    """
    let_begin(OVERLAPS)
    teams: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    tile: tl.constexpr = DEPTH * LANES
    row, team, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head, first_head = team // teams, team % teams * BLOCK_G
    position = tl.load(rows + row * 4 + 1).to(tl.int32)
    table = tables + tl.load(rows + row * 4 + 3) * table_stride
    num_tiles = position // tile + 1
    share = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), 2)
    used = tl.cdiv(num_tiles, share)
    low = split * share
    high = tl.minimum(num_tiles, low + share)
    if low >= num_tiles:
        return
    if tl.load(rows + row * 4 + 2) == 0:
        # If no program waited, this kernel would finish before the preceding one.
        wait(OVERLAPS)
        return
    g = tl.arange(0, BLOCK_G)[:, None, None, None]
    keys = low * tile + tl.arange(0, DEPTH)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    lane = tl.arange(0, LANES)[None, None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, None, :]
    # Adjacent elements have adjacent partners.
    run: tl.constexpr = 8 if HEAD_DIM % 16 == 0 else 1
    partner = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
    partner = tl.max_contiguous(tl.multiple_of(partner, [1, 1, 1, run]), [1, 1, 1, run])
    # Values needed by all lanes are loaded by each lane, so that they are where they are used.
    shared = lane * 0
    has_dim = d + shared < HEAD_DIM
    # Two tiles are in flight, so that few intermediate results have to be kept at once.
    k, v = _kept(k_cache, v_cache, table, keys, position, kv_head, d, shared, HEAD_DIM, BLOCK_TOKENS, CACHE_HEADS)
    after = keys + tile
    next_k, next_v = _kept(
        k_cache, v_cache, table, after, position, kv_head, d, shared, HEAD_DIM, BLOCK_TOKENS, CACHE_HEADS
    )
    slot = tl.load(slots + row)
    # Only one program has the newest key.
    is_newest = has_dim & (high == num_tiles)
    q_gain_x, q_gain_y, k_gain_x, k_gain_y = k, k, k, k
    if HAS_NORMS:
        q_gain_x, q_gain_y = _halves(q_norm + shared, d, partner, has_dim)
        k_gain_x, k_gain_y = _halves(k_norm + shared, d, partner, is_newest)
    wait(OVERLAPS)
    heads = qkv + row.to(tl.int64) * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
    angles = cos_sin + row * (2 * HEAD_DIM) + shared
    asking = heads + (kv_head * GROUP + first_head + g) * HEAD_DIM + shared
    asked = heads + (KV_HEADS * GROUP + kv_head) * HEAD_DIM + shared
    q_x, q_y = _halves(asking, d, partner, (first_head + g < GROUP) & has_dim)
    cos, sin = tl.load(angles + d, mask=has_dim, other=0.0), tl.load(angles + HEAD_DIM + d, mask=has_dim, other=0.0)
    k_x, k_y = _halves(asked, d, partner, is_newest)
    new_v = tl.load(asked + KV_HEADS * HEAD_DIM + d, mask=is_newest, other=0.0)
    is_low = d < HEAD_DIM // 2
    queries = _rotated(q_x, q_y, q_gain_x, q_gain_y, cos, sin, is_low, eps, HEAD_DIM, HAS_NORMS).to(tl.float32) * scale
    highest = tl.full([BLOCK_G, 1, LANES, 1], UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_G, 1, LANES, 1], tl.float32)
    mixed = tl.zeros([BLOCK_G, 1, LANES, BLOCK_D], tl.float32)
    if high == num_tiles:
        new_k = _rotated(k_x, k_y, k_gain_x, k_gain_y, cos, sin, is_low, eps, HEAD_DIM, HAS_NORMS)
        # A negative slot marks a token that is not written.
        is_writer = has_dim & (lane == 0) & (first_head == 0) & (slot >= 0)
        target = (slot * CACHE_HEADS + kv_head) * HEAD_DIM + d + shared
        tl.store(k_cache + target, new_k, mask=is_writer)
        tl.store(v_cache + target, new_v, mask=is_writer)
        # The first lane starts from the newest key.
        newest = tl.sum(queries * new_k.to(tl.float32), axis=3, keep_dims=True)
        highest = tl.where(lane == 0, newest, highest)
        total = tl.where(lane == 0, 1.0, total)
        mixed = tl.where(lane == 0, new_v.to(tl.float32), mixed)
    for number in range(low, high):
        scores = tl.sum(queries * k.to(tl.float32), axis=3, keep_dims=True)
        is_key = (keys < position)[:, :, :, None]
        scores = tl.where(is_key, scores, UNSEEN)
        higher = tl.maximum(highest, tl.max(scores, axis=1, keep_dims=True))
        weights = tl.where(is_key, tl.exp2(scores - higher), 0.0)
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(weights, axis=1, keep_dims=True)
        mixed = mixed * faded + tl.sum(weights * v.to(tl.float32), axis=1, keep_dims=True)
        highest = higher
        keys += tile
        k, v = next_k, next_v
        if number + 2 < high:
            after = keys + tile
            next_k, next_v = _kept(
                k_cache, v_cache, table, after, position, kv_head, d, shared, HEAD_DIM, BLOCK_TOKENS, CACHE_HEADS
            )
    peak, total = tl.reduce((highest, total), 2, _both, keep_dims=True)
    mixed = tl.sum(mixed * tl.exp2(highest - peak), axis=2, keep_dims=True) * (1.0 / total)
    at = (row * KV_HEADS + kv_head) * GROUP + first_head
    target = out + (at + g) * HEAD_DIM + d
    is_target = (first_head + g < GROUP) & (d < HEAD_DIM)
    if used == 1:
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_target)
        return
    one = row * (KV_HEADS * teams) + team
    left = one * BLOCK_G + g
    tl.store(parts + (left * BLOCK_D + d) * NUM_SPLITS + split, mixed)
    tl.store(sums + left * NUM_SPLITS + split, peak + tl.log2(total))
    # The barrier makes all threads write before the counter is incremented; acq_rel orders it after the writes.
    tl.debug_barrier()
    if tl.atomic_add(arrived + one, 1, sem="acq_rel") == used - 1:
        _join_splits(
            parts, sums, out + at * HEAD_DIM, one, used, GROUP - first_head, HEAD_DIM, NUM_SPLITS, BLOCK_G, BLOCK_D
        )
        tl.store(arrived + one, 0)
