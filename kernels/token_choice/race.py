"""The race of exponential clocks among tokens: those of a part of a row, or those kept of a truncated row."""

import triton
import triton.language as tl

from kernels.token_choice.truncation import distance_of


@triton.jit
def _gumbel(word):
    """Map 32-bit words to standard Gumbel variables, as `kernels.token_choice.reference` does."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log1p(-v): the quotient compensates for the rounding of 1 - v (Kahan).
    u = 1.0 - v
    clock = tl.where(u == 1.0, v, tl.log(u) * v / (u - 1.0))
    return -tl.log(clock)


@triton.jit
def _better(value, token, best, best_token):
    """Keep the better of two candidates per lane; the earlier one if they are equal."""
    wins = value > best
    return tl.where(wins, value, best), tl.where(wins, token, best_token)


@triton.jit
def winner_of_part(logits, low, high, none, highest, temperature, seed, position, BLOCK: tl.constexpr):
    """Return the best score of a race among tokens `low` to `high`, and the first token that has it.

    The noise of four adjacent tokens comes from one Philox counter: a tile is [counters, 4].
    """
    drawn = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
    drawn_token = tl.zeros([BLOCK // 4, 4], tl.int32)
    for start in range(low, high, BLOCK):
        counter = start // 4 + tl.arange(0, BLOCK // 4)
        zero = counter * 0
        words = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
        word = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape([BLOCK // 4, 4])
        token = counter[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = tl.load(logits + token, mask=token < high, other=float("-inf"))
        score = _gumbel(word) - distance_of(value, highest, temperature)
        drawn, drawn_token = _better(score, token, drawn, drawn_token)
    score = tl.max(tl.max(drawn, axis=1), axis=0)
    return score, tl.min(tl.min(tl.where(drawn == score, drawn_token, none), axis=1), axis=0)


@triton.jit
def winner_among(
    logits, count, tokens, num_named, highest, temperature, least, farthest, last, seed, position, BLOCK: tl.constexpr
):
    """Return the token that wins the race among the kept ones of `count` logits.

    The ids of the first `num_named` logits are in `tokens`; that of any other is its index. A logit is kept if its
    distance is below `farthest`, or equal to it at an index of at most `last`, and its score is at least `least`.
    """
    drawn = tl.full([BLOCK], float("-inf"), tl.float32)
    drawn_token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, mask=at < count, other=float("-inf"))
        distance = distance_of(value, highest, temperature)
        is_kept = (distance < farthest) | ((distance == farthest) & (at <= last))
        token = tl.where(at < num_named, tl.load(tokens + at, mask=is_kept & (at < num_named), other=0), at)
        zero = token * 0
        words = tl.philox(seed, token // 4, zero + position.to(tl.int32), zero, zero)
        lane = token % 4
        word = tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
        score = tl.where(is_kept & (-distance >= least), _gumbel(word) - distance, float("-inf"))
        drawn, drawn_token = _better(score, token, drawn, drawn_token)
    return tl.min(tl.where(drawn == tl.max(drawn, axis=0), drawn_token, 2147483647), axis=0)
