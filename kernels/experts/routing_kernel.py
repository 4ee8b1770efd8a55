"""GPU router: chooses experts, or takes a choice, and cuts the rows of each expert into tiles in the same pass.

Each expert has slots for all rows, filled in the order in which programs arrive. That order is not deterministic, but
results are: a row of a product does not depend on its neighbors.
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def _keys_of(logits, expert):
    """Return integers in the order of logits [rows, experts]; of equal logits the first expert's is the largest.

    They are distinct, so a maximum identifies both the expert and its logit. NaN is ordered too.
    """
    # Maps -0 to 0, because they are equal.
    value = tl.where(logits == 0, tl.zeros_like(logits), logits)
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        keys = ((bits ^ ((bits >> 31) & 0x7FFF)) << 16) | (0x7FFF - expert)
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        keys = ((bits ^ ((bits >> 63) & 0x7FFFFFFF)) << 32) | (0x7FFF - expert).to(tl.int64)
    return keys


@triton.jit
def _told_by(keys, dtype: tl.constexpr):
    """Return the logits, float32, and the experts that keys from `_keys_of` encode."""
    expert = 0x7FFF - (keys & 0x7FFF).to(tl.int32)
    if dtype.primitive_bitwidth == 16:
        order = keys >> 16
        value = (order ^ ((order >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True)
    else:
        order = keys >> 32
        value = (order ^ ((order >> 63) & 0x7FFFFFFF)).to(tl.int32).to(dtype, bitcast=True)
    return value.to(tl.float32), expert


@triton.jit
def _choose(logits, row, place, expert, rows, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, IS_NORMED: tl.constexpr):
    """Return the most likely experts of `row` [BLOCK_R, 1], by `place` [1, BLOCK_C], and their weights."""
    is_logit = (row < rows) & (expert < EXPERTS)
    value = tl.load(logits + row * EXPERTS + expert, mask=is_logit, other=0.0)
    keys = _keys_of(value, expert)
    LEAST: tl.constexpr = -(1 << (keys.dtype.primitive_bitwidth - 1))
    keys = tl.where(expert < EXPERTS, keys, LEAST)
    best = tl.zeros([row.shape[0], place.shape[1]], keys.dtype)
    for at in range(CHOSEN):
        highest = tl.max(keys, axis=1)[:, None]
        best = tl.where(place == at, highest, best)
        keys = tl.where(keys == highest, LEAST, keys)
    value = tl.where(expert < EXPERTS, value.to(tl.float32), float("-inf"))
    peak = tl.max(value, axis=1)[:, None]
    total = tl.sum(tl.exp(value - peak), axis=1)[:, None]
    likely, chosen = _told_by(best, logits.dtype.element_ty)
    share = tl.where(place < CHOSEN, tl.exp(likely - peak) / total, 0.0)
    if IS_NORMED:
        share /= tl.sum(share, axis=1)[:, None]
    return chosen, share


@triton.jit(do_not_specialize=["num_decodes", "rows", "height"])
def route_kernel(
    logits,
    decodes,
    experts,
    weights,
    counts,
    slots,
    tiles,
    num_tiles,
    num_decodes,
    rows,
    height,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Each program chooses for BLOCK_R rows, or reads the choice if IS_CHOSEN; if HAS_TILES, the last one cuts tiles.

        logits            [rows, EXPERTS]   unused if IS_CHOSEN
        experts, weights  [rows, CHOSEN]    int32, most likely first; float32
        slots             [EXPERTS, rows]   int32: the pairs routed to each expert; pair = row * CHOSEN + place
        tiles             [any, 3]          int32: expert, first of at most `height` slots, end of the expert's slots
        num_tiles         [1]               int32
        counts            [EXPERTS + 1]     int32: pairs per expert, and finished programs; zero before and after

    The first `num_decodes` rows are those of `decodes` [any, 4] int64, as in `kernels.paged_attention.launch`; a row of
    no tokens is in no tile. If a logit is NaN, all weights of its row are NaN and its experts are arbitrary but valid.
    """
    take_turn(OVERLAPS)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    place = tl.arange(0, BLOCK_C)[None, :]
    pair = row * CHOSEN + place
    is_pair = (row < rows) & (place < CHOSEN)
    if IS_CHOSEN:
        chosen = tl.load(experts + pair, mask=is_pair, other=0)
    else:
        expert = tl.arange(0, BLOCK_E)[None, :]
        chosen, share = _choose(logits, row, place, expert, rows, EXPERTS, CHOSEN, IS_NORMED)
        tl.store(experts + pair, chosen, mask=is_pair)
        tl.store(weights + pair, share, mask=is_pair)
    if HAS_TILES:
        is_decode = row < num_decodes
        is_pair = is_pair & ((tl.load(decodes + row * 4 + 2, mask=is_decode, other=0) > 0) | (row >= num_decodes))
        slot = chosen * rows + tl.atomic_add(counts + chosen, 1, mask=is_pair, sem="relaxed")
        tl.store(slots + slot, pair, mask=is_pair)
        # The barrier makes all threads count before the program is counted; acq_rel orders that after the counts.
        tl.debug_barrier()
        if tl.atomic_add(counts + EXPERTS, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            _cut(counts, tiles, num_tiles, rows, height, EXPERTS, BLOCK_E)


@triton.jit
def _cut(counts, tiles, num_tiles, rows, height, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Cut each expert's slots into tiles, in expert order, and reset the counts."""
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < EXPERTS
    count = tl.load(counts + expert, mask=is_expert, other=0, cache_modifier=".cg")
    own = tl.cdiv(count, height)
    first = tl.cumsum(own, axis=0) - own
    tl.store(num_tiles, tl.sum(own, axis=0))
    for at in range(tl.max(own, axis=0)):
        tile = tiles + (first + at) * 3
        tl.store(tile, expert, mask=at < own)
        tl.store(tile + 1, expert * rows + at * height, mask=at < own)
        tl.store(tile + 2, expert * rows + count, mask=at < own)
    tl.store(counts + expert, 0, mask=is_expert)
    tl.store(counts + EXPERTS, 0)
