"""Top-k and top-p truncation of a row of logits by bisecting a threshold: the sorted definition without the sort.

Every token has a distance  m = (highest logit - logit) / temperature >= 0  and a probability proportional to e^-m.
Ordered by (distance, id), likeliest first,

    top-k keeps the first k,      top-p the shortest prefix whose mass is at least p times that of all tokens left.

Both keep everything nearer than some distance, and of the tokens at that distance those up to some id. A pass over the
row measures what is nearer than a pivot, and also finds the largest distance below the pivot and the smallest from it
on, so that bounds are distances that occur and the search ends when they meet. This takes about 18 passes for 128,000
tokens, which is why `kernels.token_choice.shortlist` reduces the row first. Counts and masses are integers, masses in
units of 2^-40 of the likeliest token's, so that sums do not depend on their order.

Source: pivot search as in Ye et al., 2025 (FlashInfer, arXiv 2501.01005). There the pivot is random; here it is the
midpoint, because the kept set must be exactly that of the definition.
"""

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(4)
"""Blocks loaded at once, because the search runs in one program, which waits for each load."""


@triton.jit
def distance_of(logit, highest, temperature):
    """Return how far logits lie below the highest, by a single correctly rounded division, as in the definition."""
    return tl.div_rn(highest - logit, temperature)


@triton.jit
def mass_of(distance):
    """Return e^-distance in units of 2^-40, rounded down; zero beyond a distance of 28."""
    return (tl.exp(-distance) * 1099511627776.0).to(tl.int64)


@triton.jit
def survey(logits, vocab, highest, temperature, pivot, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the count or mass of tokens nearer than `pivot`, the largest such distance, and the smallest other one."""
    lanes = tl.arange(0, AT_ONCE)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    measured = tl.zeros([BLOCK], tl.int64)
    below = tl.zeros([BLOCK], tl.float32)
    above = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, AT_ONCE * BLOCK):
        token = start + lanes
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        distance = distance_of(logit, highest, temperature)
        is_near = distance < pivot
        share = mass_of(distance) if IS_MASS else 1
        measured += tl.sum(tl.where(is_near, share, 0), axis=0)
        below = tl.maximum(below, tl.max(tl.where(is_near, distance, 0.0), axis=0))
        above = tl.minimum(above, tl.min(tl.where(is_near, float("inf"), distance), axis=0))
    return tl.sum(measured, axis=0), tl.max(below, axis=0), tl.min(above, axis=0)


@triton.jit
def _narrow(logits, vocab, highest, temperature, farthest, wanted, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the distance at which the count or mass reaches `wanted`, and how many tokens at that distance it takes.

    `farthest` is a distance that occurs, and the tokens up to it reach `wanted`.
    """
    # Tokens nearer than `low` do not reach it; the distance sought lies in [low, high].
    low = tl.zeros([], tl.float32)
    high = farthest
    nearer = tl.zeros([], tl.int64)
    while low < high:
        middle = low + (high - low) * 0.5
        pivot = tl.where(middle > low, middle, high)
        measured, below, above = survey(logits, vocab, highest, temperature, pivot, IS_MASS, BLOCK)
        reaches = measured >= wanted
        high = tl.where(reaches, below, high)
        low = tl.where(reaches, low, above)
        nearer = tl.where(reaches, nearer, measured)
    share = tl.maximum(mass_of(low), 1) if IS_MASS else 1
    return low, tl.maximum((wanted - nearer + share - 1) // share, 1)


@triton.jit
def _last_of(logits, vocab, highest, temperature, distance, count, BLOCK: tl.constexpr):
    """Return the id of the `count`-th token at `distance`, or of the last one if there are fewer."""
    lanes = tl.arange(0, BLOCK)
    seen = tl.zeros([], tl.int32)
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lanes
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        is_there = (distance_of(logit, highest, temperature) == distance).to(tl.int32)
        rank = seen + tl.cumsum(is_there, axis=0)
        last = tl.where((is_there > 0) & (rank <= count), token, last)
        seen += tl.sum(is_there, axis=0)
    return tl.max(last, axis=0)


@triton.jit
def wanted_of(mass, top_p):
    """Return the smallest integer mass that is at least `top_p` times `mass` (float64)."""
    exact = mass * top_p
    wanted = exact.to(tl.int64)
    wanted += (wanted.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(wanted, 1)


@triton.jit
def cut(logits, vocab, highest, temperature, top_k, top_p, mass, BLOCK: tl.constexpr):
    """Return (distance, id) of the last token that is kept; `top_k` 0 and `top_p` 1 keep all.

    Tokens with a logit of minus infinity have an infinite distance: they are never kept, nor counted by top-p. `mass`
    (float64) is that of all tokens.
    """
    distance = tl.full([], float("inf"), tl.float32)
    last = tl.zeros([], tl.int32) + vocab
    num_finite, farthest, _ = survey(logits, vocab, highest, temperature, float("inf"), False, BLOCK)
    count = tl.zeros([], tl.int64)
    if (top_k > 0) & (top_k < num_finite):
        distance, count = _narrow(logits, vocab, highest, temperature, farthest, top_k, False, BLOCK)
    if top_p < 1.0:
        near, nearest, _ = survey(logits, vocab, highest, temperature, tl.minimum(distance, 28.0), True, BLOCK)
        # The tokens that top-k keeps at its cut distance count too.
        wanted = wanted_of(tl.where(count > 0, (near + count * mass_of(distance)).to(tl.float64), mass), top_p)
        if near >= wanted:
            distance, count = _narrow(logits, vocab, highest, temperature, nearest, wanted, True, BLOCK)
        elif count > 0:
            share = tl.maximum(mass_of(distance), 1)
            count = tl.minimum(count, (wanted - near + share - 1) // share)
    if count > 0:
        last = _last_of(logits, vocab, highest, temperature, distance, count.to(tl.int32), BLOCK)
    return distance, last
