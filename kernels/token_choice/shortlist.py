"""The shortlist of a truncated ("cut") row: the highest tokens of each part, found by the part's own program.

A search of 18 passes over a whole vocabulary is slow in one program, and cannot be shared, because each pivot would
need a synchronization of all programs. So each part lists its tokens above a logit of its own, the edge, at most
`KEPT`, and the total mass of its tokens. Together the lists contain every token above the highest edge, ordered by id.
If the cut lies above that edge, which one pass over the lists tells, they are searched instead of the row. A nucleus,
or a top-k, of several thousand tokens is searched for in the whole row.
"""

import triton
import triton.language as tl

from kernels.token_choice.race import winner_among
from kernels.token_choice.truncation import cut, distance_of, mass_of, survey, wanted_of


@triton.jit
def edge_of(value, highest, KEPT: tl.constexpr):
    """Return a logit above which at most `KEPT` of `value` [n] lie; minus infinity if that is all of them."""
    is_there = value > float("-inf")
    edge = tl.full([], float("-inf"), tl.float32)
    if tl.sum(is_there.to(tl.int32), axis=0) > KEPT:
        # Invariant: at most KEPT lie above `edge`; more lie above `low`, unless it is still the minimum.
        low, edge = tl.min(tl.where(is_there, value, float("inf")), axis=0), highest
        num_above = tl.zeros([], tl.int32)
        middle = low * 0.5 + edge * 0.5
        while (num_above < KEPT // 4) & (low < middle) & (middle < edge):
            num_middle = tl.sum((value > middle).to(tl.int32), axis=0)
            fits = num_middle <= KEPT
            low = tl.where(fits, low, middle)
            edge = tl.where(fits, middle, edge)
            num_above = tl.where(fits, num_middle, num_above)
            middle = low * 0.5 + edge * 0.5
    return edge


@triton.jit
def shorten(
    logits, low, high, edge, highest, temperature, listed, listed_tokens, KEPT: tl.constexpr, BLOCK: tl.constexpr
):
    """List the tokens from `low` to `high` above the edge; return the mass of all, in 2^-40 of that of `highest`."""
    mass = tl.zeros([BLOCK], tl.int64)
    num_listed = tl.zeros([], tl.int32)
    for start in range(low, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < high, other=float("-inf"))
        is_above = value > edge
        place = num_listed + tl.cumsum(is_above.to(tl.int32), axis=0) - 1
        tl.store(listed + place, value, mask=is_above)
        tl.store(listed_tokens + place, token, mask=is_above)
        num_listed += tl.sum(is_above.to(tl.int32), axis=0)
        distance = tl.where(value > float("-inf"), distance_of(value, highest, temperature), float("inf"))
        mass += mass_of(distance)
    rest = tl.arange(0, KEPT)
    tl.store(listed + rest, float("-inf"), mask=rest >= num_listed)
    return tl.sum(mass, axis=0)


@triton.jit
def drawn_of_cut(
    logits,
    vocab,
    listed,
    listed_tokens,
    num_listed,
    edge,
    highest,
    temperature,
    least,
    top_k,
    top_p,
    mass,
    seed,
    position,
    BLOCK: tl.constexpr,
):
    """Return the token of a cut row, from the lists if they suffice, else from the whole row.

    `edge` is the highest edge of all parts; `least` is the lowest score that min-p keeps; `mass` (float64) is that of
    the whole row.
    """
    reach = distance_of(edge, highest, temperature)
    if top_k > 0:
        near, _, _ = survey(listed, num_listed, highest, temperature, reach, False, BLOCK)
        is_enough = near >= top_k
    elif top_p < 1.0:
        near, _, _ = survey(listed, num_listed, highest, temperature, reach, True, BLOCK)
        is_enough = near >= wanted_of(mass, top_p)
    else:
        is_enough = -least < reach
    is_enough |= edge == float("-inf")
    among = listed if is_enough else logits
    num_listed = tl.where(is_enough, num_listed, 0)
    count = tl.where(is_enough, num_listed, vocab)
    farthest, last = cut(among, count, highest, temperature, top_k, top_p, mass, BLOCK)
    return winner_among(
        among, count, listed_tokens, num_listed, highest, temperature, least, farthest, last, seed, position, BLOCK
    )
