"""GPU kernels for log-probabilities of one token of each row and of its likeliest ones, without a sort.

A key orders like the pair of a logit and its token, lower ids first. So the highest key is unique and found by one
reduction, and the next highest by another one without it.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _key_of(logit, token):
    """Return int64 keys of logits and their tokens (int32)."""
    # Adding zero turns -0.0 into 0.0. Read as signed integers, floats of one sign sort by their bits: negative ones in
    # reverse, which flipping all bits but the sign undoes.
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_top"])
def logprob_parts_kernel(
    logits,
    token_ids,
    sums,
    counts,
    keys,
    vocab,
    num_top,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    """Program (row, part) measures a part of a row of `logits` [rows, vocab] float32.

    It writes the part's highest logit and the sum of exponentials relative to it (`sums`, float32 [rows, parts, 2]),
    how many logits are above that of the row's token (`counts`, int32 [rows, parts]), and the part's highest keys
    (`keys`, int64 [rows, parts, MAX_TOP], of which `num_top` are written). `token_ids` is int64 [rows].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocab
    token = part * PART + tl.arange(0, PART)
    is_token = token < vocab
    logit = tl.load(logits + token, mask=is_token, other=float("-inf"))
    highest = tl.max(logit, axis=0)
    # Of a part with only minus infinity, nothing must become NaN.
    share = tl.where(logit > float("-inf"), tl.exp(logit - highest), 0.0)
    at = row * NUM_PARTS + part
    tl.store(sums + 2 * at, highest)
    tl.store(sums + 2 * at + 1, tl.sum(share, axis=0))
    asked = tl.load(logits + tl.load(token_ids + row))
    tl.store(counts + at, tl.sum((logit > asked).to(tl.int32), axis=0))
    key = tl.where(is_token, _key_of(logit, token), NO_KEY)
    for place in range(num_top):
        best = tl.max(key, axis=0)
        tl.store(keys + at * MAX_TOP + place, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["num_top"])
def joined_logprobs_kernel(
    logits,
    token_ids,
    sums,
    counts,
    keys,
    told,
    vocab,
    num_top,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    """Program (row) joins its parts into `told` [rows, 2 + 2 num_top] float64 (`kernels.token_logprobs.reference`)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    is_part = part < NUM_PARTS
    at = row * NUM_PARTS + part
    highest = tl.load(sums + 2 * at, mask=is_part, other=float("-inf"))
    mass = tl.load(sums + 2 * at + 1, mask=is_part, other=0.0)
    peak = tl.max(highest, axis=0)
    total = tl.log(tl.sum(tl.where(mass > 0, mass * tl.exp(highest - peak), mass), axis=0))
    asked = tl.load(logits + row * vocab + tl.load(token_ids + row))
    rank = 1 + tl.sum(tl.load(counts + at, mask=is_part, other=0), axis=0)
    told += row * (2 + 2 * num_top)
    tl.store(told, (asked - peak - total).to(tl.float64))
    tl.store(told + 1, rank.to(tl.float64))
    place = tl.arange(0, MAX_TOP)[None, :]
    is_key = is_part[:, None] & (place < num_top)
    key = tl.load(keys + at[:, None] * MAX_TOP + place, mask=is_key, other=NO_KEY)
    for number in range(num_top):
        best = tl.max(tl.max(key, axis=1), axis=0)
        tl.store(told + 2 + number, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.float64))
        tl.store(told + 2 + num_top + number, (_logit_of(best) - peak - total).to(tl.float64))
        key = tl.where(key == best, NO_KEY, key)
