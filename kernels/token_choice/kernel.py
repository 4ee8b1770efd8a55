"""The GPU's choice of tokens: health, maximum, truncation and the race of exponential clocks, without a sort."""

import triton
import triton.language as tl

from kernels.token_choice.truncation import AT_ONCE, cut, distance_of


@triton.jit
def _gumbel(word):
    """Turn 32-bit words into standard Gumbel variables, as `kernels.token_choice.reference` does."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log1p(-v): the quotient takes back what 1 - v has rounded away (Kahan).
    u = 1.0 - v
    clock = tl.where(u == 1.0, v, tl.log(u) * v / (u - 1.0))
    return -tl.log(clock)


@triton.jit
def _better(value, token, best, best_token):
    """Keep the higher of two candidates of each lane; of equal ones the one that came first."""
    wins = value > best
    return tl.where(wins, value, best), tl.where(wins, token, best_token)


@triton.jit
def _likeliest(logits, low, high, none, BLOCK: tl.constexpr):
    """Return the highest of logits `low` to `high`, the first token that has it, and whether one is no number."""
    lanes = tl.arange(0, AT_ONCE)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    poisoned = tl.zeros([BLOCK], tl.int32)
    for start in range(low, high, AT_ONCE * BLOCK):
        token = start + lanes
        value = tl.load(logits + token, mask=token < high, other=float("-inf"))
        poisoned |= tl.max(((value != value) | (value == float("inf"))).to(tl.int32), axis=0)
        highest = tl.max(value, axis=0)
        first = tl.min(tl.where(value == highest[None, :], token, none), axis=0)
        best, best_token = _better(highest, first, best, best_token)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, best_token, none), axis=0), tl.max(poisoned, axis=0)


@triton.jit
def _winner(logits, low, high, none, highest, temperature, least, farthest, last, seed, position, BLOCK: tl.constexpr):
    """Return the best score of a race among tokens `low` to `high`, and the first token that has it.

    Each of a quarter as many lanes looks at the four tokens whose noise one counter of Philox brings.
    """
    drawn = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    drawn_token = tl.zeros([BLOCK // 4], tl.int32)
    for start in range(low, high, BLOCK):
        counter = start // 4 + tl.arange(0, BLOCK // 4)
        zero = counter * 0
        words = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
        for lane in tl.static_range(4):
            token = counter * 4 + lane
            value = tl.load(logits + token, mask=token < high, other=float("-inf"))
            distance = distance_of(value, highest, temperature)
            is_kept = (distance < farthest) | ((distance == farthest) & (token <= last))
            score = tl.where(is_kept & (-distance >= least), _gumbel(words[lane]) - distance, float("-inf"))
            drawn, drawn_token = _better(score, token, drawn, drawn_token)
    score = tl.max(drawn, axis=0)
    return score, tl.min(tl.where(drawn == score, drawn_token, none), axis=0)


@triton.jit
def _best_of(numbers, tokens, row, vocab, is_drawn, temperature, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the token of a row, given what its parts left, or -1."""
    p = tl.arange(0, BLOCK_P)
    is_part = p < NUM_PARTS
    at = row * 2 * NUM_PARTS + p
    peaks = tl.load(numbers + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    scores = tl.load(numbers + at + NUM_PARTS, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    winners = tl.load(tokens + row * NUM_PARTS + p, mask=is_part, other=vocab, cache_modifier=".cg")
    highest = tl.max(peaks, axis=0)
    # A part of nothing but minus infinity has no winner.
    is_candidate = peaks > float("-inf")
    distances = tl.where(is_candidate, distance_of(peaks, highest, temperature), float("inf"))
    scores = tl.where(is_drawn, scores - distances, peaks)
    is_best = is_candidate & (scores == tl.max(scores, axis=0))
    is_healthy = (tl.min(winners, axis=0) >= 0) & (highest > float("-inf"))
    return tl.where(is_healthy, tl.min(tl.where(is_best, winners, vocab), axis=0), -1)


@triton.jit
def token_choice_kernel(
    logits,
    knobs,
    seeds,
    numbers,
    tokens,
    arrived,
    chosen,
    vocab,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, p) looks at part p of row r of `logits` [rows, vocab] float32; the last one there chooses.

    -1 where no number is the highest. `knobs` [rows, 4] float64 are temperature (0: the likeliest token), the logarithm
    of min-p, top-k and top-p; `seeds` [rows, 2] int64 are seed and position. Of rows that are not cut each part has a
    race of its own, with the part's highest for a mark; others are their first program's alone. `numbers` is float32
    [rows, 2, parts], highest logit and best score; `tokens` int32 [rows, parts], who has that, -1 where a logit is no
    number; `arrived` int32 [rows]: zeros, and zeros again in the end.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocab
    knobs += row * 4
    temperature, least = tl.load(knobs).to(tl.float32), tl.load(knobs + 1).to(tl.float32)
    top_k, top_p = tl.load(knobs + 2).to(tl.int64), tl.load(knobs + 3).to(tl.float32)
    is_drawn = temperature > 0.0
    temperature = tl.maximum(temperature, 1e-30)
    is_cut = is_drawn & ((top_k > 0) | (top_p < 1.0) | (least > float("-inf")))
    if is_cut & (part > 0):
        return
    low = part * PART
    high = tl.where(is_cut, vocab, tl.minimum(vocab, low + PART))
    highest, winner, is_poisoned = _likeliest(logits, low, high, vocab, BLOCK)
    score, is_healthy = highest, (is_poisoned == 0) & (highest > float("-inf"))
    if is_drawn & is_healthy:
        farthest, last = tl.full([], float("inf"), tl.float32), tl.zeros([], tl.int32) + vocab
        if is_cut & ((top_k > 0) | (top_p < 1.0)):
            farthest, last = cut(logits, vocab, highest, temperature, top_k, top_p.to(tl.float64), BLOCK)
        seed, position = tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1)
        score, winner = _winner(
            logits, low, high, vocab, highest, temperature, least, farthest, last, seed, position, BLOCK
        )
    if is_cut | (NUM_PARTS == 1):
        tl.store(chosen + row, tl.where(is_healthy, winner, -1).to(tl.int64))
        return
    at = row * 2 * NUM_PARTS + part
    tl.store(numbers + at, highest)
    tl.store(numbers + at + NUM_PARTS, score)
    tl.store(tokens + row * NUM_PARTS + part, tl.where(is_poisoned == 0, winner, -1))
    # All of the program has written before it says so, and what it says is seen after what it wrote.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == NUM_PARTS - 1:
        best = _best_of(numbers, tokens, row, vocab, is_drawn, temperature, NUM_PARTS, BLOCK_P)
        tl.store(chosen + row, best.to(tl.int64))
        tl.store(arrived + row, 0)
