"""The GPU's choice of tokens: health, maximum, truncation and the race of exponential clocks, without a sort."""

import triton
import triton.language as tl

from kernels.token_choice.truncation import cut, distance_of


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
def token_choice_kernel(logits, knobs, seeds, chosen, vocab, BLOCK: tl.constexpr):
    """Program r chooses for row r of `logits` [rows, vocab] float32; -1 where no number is the highest.

    `knobs` [rows, 4] float64 are temperature (0: the likeliest token), the logarithm of min-p, top-k and top-p; `seeds`
    [rows, 2] int64 are seed and position. In the race each of a quarter as many lanes looks at the four tokens whose
    noise one counter of Philox brings.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    poisoned = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lanes
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        poisoned |= ((value != value) | (value == float("inf"))).to(tl.int32)
        best, best_token = _better(value, token, best, best_token)
    highest = tl.max(best, axis=0)
    likeliest = tl.min(tl.where(best == highest, best_token, vocab), axis=0)
    is_healthy = (tl.max(poisoned, axis=0) == 0) & (highest > float("-inf"))
    knobs += row * 4
    temperature = tl.load(knobs).to(tl.float32)
    if (temperature > 0.0) & is_healthy:
        temperature = tl.maximum(temperature, 1e-30)
        least = tl.load(knobs + 1).to(tl.float32)
        top_k, top_p = tl.load(knobs + 2).to(tl.int64), tl.load(knobs + 3).to(tl.float32)
        farthest, last = tl.full([], float("inf"), tl.float32), tl.zeros([], tl.int32) + vocab
        if (top_k > 0) | (top_p < 1.0):
            farthest, last = cut(logits, vocab, highest, temperature, top_k, top_p.to(tl.float64), BLOCK)
        seed, position = tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1)
        drawn = tl.full([BLOCK // 4], float("-inf"), tl.float32)
        drawn_token = tl.zeros([BLOCK // 4], tl.int32)
        for start in range(0, vocab, BLOCK):
            counter = start // 4 + tl.arange(0, BLOCK // 4)
            zero = counter * 0
            words = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
            for lane in tl.static_range(4):
                token = counter * 4 + lane
                value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
                distance = distance_of(value, highest, temperature)
                is_kept = (distance < farthest) | ((distance == farthest) & (token <= last))
                score = tl.where(is_kept & (-distance >= least), _gumbel(words[lane]) - distance, float("-inf"))
                drawn, drawn_token = _better(score, token, drawn, drawn_token)
        likeliest = tl.min(tl.where(drawn == tl.max(drawn, axis=0), drawn_token, vocab), axis=0)
    tl.store(chosen + row, tl.where(is_healthy, likeliest, -1).to(tl.int64))
