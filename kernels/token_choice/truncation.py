"""Where top-k and top-p cut a row of logits, found by narrowing a threshold: the sorted definition without the sort.

Every token has a distance  m = (highest logit - logit) / temperature >= 0  and is so likely as e^-m. By (distance, id)
the tokens stand in one order, likeliest first, of which

    top-k keeps the first k,      top-p the shortest start whose mass is at least p times that of all that are left.

Both are: everything nearer than some distance, and of the tokens at it those up to some id. A pass over the row
measures what is nearer than a pivot, and brings the largest distance below it and the smallest one from it on, so that
the bounds lie on distances that occur and the search ends where they meet: about 18 passes for 128,000 tokens, so that
`kernels.token_choice.shortlist` goes over what matters of them. Counts and masses are whole numbers, masses in 2^-40 of
the likeliest token's: their sums are the same in any order.

Source: searches by pivots as in Ye et al., 2025 (FlashInfer, arXiv 2501.01005); there one is drawn, here it is the
middle, because the set that is kept is to be the definition's.
"""

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(4)
"""Blocks that are asked for at once: the search is one program's, which waits for each."""


@triton.jit
def distance_of(logit, highest, temperature):
    """Return how far logits lie below the highest, by the one division that the definition makes."""
    return tl.div_rn(highest - logit, temperature)


@triton.jit
def mass_of(distance):
    """Return e^-distance in units of 2^-40, rounded down; nothing is left of it beyond a distance of 28."""
    return (tl.exp(-distance) * 1099511627776.0).to(tl.int64)


@triton.jit
def survey(logits, vocab, highest, temperature, pivot, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Measure the tokens nearer than `pivot`; also return the largest distance below it and the smallest from it on."""
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
    """Return the distance at which what is measured reaches `wanted`, and how many of the tokens there that takes.

    The tokens up to `farthest`, a distance that occurs, reach it.
    """
    # What is nearer than `low` does not reach it; the distance wanted lies in [low, high].
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
    """Return the id of the `count`-th token at a distance, the last one where there are fewer."""
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
    """Return the least whole mass that is at least `top_p` of one (float64)."""
    exact = mass * top_p
    wanted = exact.to(tl.int64)
    wanted += (wanted.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(wanted, 1)


@triton.jit
def cut(logits, vocab, highest, temperature, top_k, top_p, mass, BLOCK: tl.constexpr):
    """Return (distance, id) of the last token that is kept; `top_k` 0 and `top_p` 1 keep all.

    Tokens of minus infinity are at no finite distance: never kept, nor counted by top-p. `mass` (float64) is that of
    all tokens.
    """
    distance = tl.full([], float("inf"), tl.float32)
    last = tl.zeros([], tl.int32) + vocab
    num_finite, farthest, _ = survey(logits, vocab, highest, temperature, float("inf"), False, BLOCK)
    count = tl.zeros([], tl.int64)
    if (top_k > 0) & (top_k < num_finite):
        distance, count = _narrow(logits, vocab, highest, temperature, farthest, top_k, False, BLOCK)
    if top_p < 1.0:
        near, nearest, _ = survey(logits, vocab, highest, temperature, tl.minimum(distance, 28.0), True, BLOCK)
        # What top-k keeps of the tokens at its own distance counts too.
        wanted = wanted_of(tl.where(count > 0, (near + count * mass_of(distance)).to(tl.float64), mass), top_p)
        if near >= wanted:
            distance, count = _narrow(logits, vocab, highest, temperature, nearest, wanted, True, BLOCK)
        elif count > 0:
            share = tl.maximum(mass_of(distance), 1)
            count = tl.minimum(count, (wanted - near + share - 1) // share)
    if count > 0:
        last = _last_of(logits, vocab, highest, temperature, distance, count.to(tl.int32), BLOCK)
    return distance, last
