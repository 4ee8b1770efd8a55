"""GPU sampler: NaN check, maximum, truncation and the race of exponential clocks, without a sort."""

import triton
import triton.language as tl

from kernels.token_choice.race import winner_of_part
from kernels.token_choice.shortlist import drawn_of_cut, edge_of, shorten
from kernels.token_choice.truncation import distance_of


@triton.jit
def _likeliest(value, token, none):
    """Return the highest of logits [n], the first token that has it, and whether any is NaN or infinity (int32)."""
    highest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == highest, token, none), axis=0)
    return highest, first, tl.max(((value != value) | (value == float("inf"))).to(tl.int32), axis=0)


@triton.jit
def _best_of(peaks, marks, winners, vocab, is_drawn, highest, temperature):
    """Return the token of a row without truncation, given its parts' highest logits, best scores and winners."""
    # A part with only minus infinity has no winner.
    is_candidate = peaks > float("-inf")
    distances = tl.where(is_candidate, distance_of(peaks, highest, temperature), float("inf"))
    scores = tl.where(is_drawn, marks - distances, peaks)
    is_best = is_candidate & (scores == tl.max(scores, axis=0))
    return tl.min(tl.where(is_best, winners, vocab), axis=0)


@triton.jit
def token_choice_kernel(
    logits,
    knobs,
    seeds,
    numbers,
    masses,
    winners,
    listed,
    listed_tokens,
    arrived,
    chosen,
    vocab,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program (r, p) scans part p of row r of `logits` [rows, vocab] float32; the row's last program chooses the token.

    The result is -1 if a row has NaN or infinity, or only minus infinity. `knobs` [rows, 4] float64 are temperature (0
    for greedy), the logarithm of min-p, top-k and top-p; `seeds` [rows, 2] int64 are seed and position. Without
    truncation, each part runs its own race, with scores relative to the part's highest logit. With truncation ("cut"
    rows), each part lists its likeliest tokens, and those that are kept run one race. Buffers between the programs of a
    row:

        numbers  float32 [rows, 2, parts]            highest logit; best score, or the edge of a cut row
        winners  int32 [rows, parts]                 the token with the best score; -1 if a logit is NaN or infinity
        masses   int64 [rows, parts]                 cut rows: the part's mass, in 2^-40 of its likeliest token's
        listed, listed_tokens  [rows, parts, KEPT]   cut rows: float32 logits, padded with minus infinity; int32 ids
        arrived  int32 [rows]                        finished programs; zero before and after the launch
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocab
    knobs += row * 4
    listed += row * NUM_PARTS * KEPT
    listed_tokens += row * NUM_PARTS * KEPT
    temperature, least = tl.load(knobs).to(tl.float32), tl.load(knobs + 1).to(tl.float32)
    top_k, top_p = tl.load(knobs + 2).to(tl.int64), tl.load(knobs + 3).to(tl.float32)
    seed, position = tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1)
    is_drawn = temperature > 0.0
    temperature = tl.maximum(temperature, 1e-30)
    is_cut = is_drawn & ((top_k > 0) | (top_p < 1.0) | (least > float("-inf")))
    low = part * PART
    high = tl.minimum(vocab, low + PART)
    token = low + tl.arange(0, PART)
    value = tl.load(logits + token, mask=token < high, other=float("-inf"))
    peak, winner, is_poisoned = _likeliest(value, token, vocab)
    mark = peak
    if is_cut:
        mark = edge_of(value, peak, KEPT)
        mass = shorten(
            logits, low, high, mark, peak, temperature, listed + part * KEPT, listed_tokens + part * KEPT, KEPT, BLOCK
        )
        tl.store(masses + row * NUM_PARTS + part, mass)
    elif is_drawn & (is_poisoned == 0) & (peak > float("-inf")):
        mark, winner = winner_of_part(logits, low, high, vocab, peak, temperature, seed, position, BLOCK)
    at = row * 2 * NUM_PARTS + part
    tl.store(numbers + at, peak)
    tl.store(numbers + at + NUM_PARTS, mark)
    tl.store(winners + row * NUM_PARTS + part, tl.where(is_poisoned == 0, winner, -1))
    # The barrier makes all threads write before the counter is incremented; acq_rel orders it after the writes.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < NUM_PARTS - 1:
        return
    p = tl.arange(0, BLOCK_P)
    is_part = p < NUM_PARTS
    at = row * 2 * NUM_PARTS + p
    peaks = tl.load(numbers + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    marks = tl.load(numbers + at + NUM_PARTS, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    best = tl.load(winners + row * NUM_PARTS + p, mask=is_part, other=vocab, cache_modifier=".cg")
    highest = tl.max(peaks, axis=0)
    is_healthy = (tl.min(best, axis=0) >= 0) & (highest > float("-inf"))
    if is_cut & is_healthy:
        shares = tl.load(masses + row * NUM_PARTS + p, mask=is_part, other=0, cache_modifier=".cg")
        far = distance_of(peaks, highest, temperature).to(tl.float64)
        mass = tl.sum(shares.to(tl.float64) * tl.exp(-far), axis=0)
        # Half blocks: with whole ones the kernel slightly exceeds its registers under Triton 3.6.
        winner = drawn_of_cut(
            logits,
            vocab,
            listed,
            listed_tokens,
            NUM_PARTS * KEPT,
            tl.max(marks, axis=0),
            highest,
            temperature,
            least,
            top_k,
            top_p.to(tl.float64),
            mass,
            seed,
            position,
            BLOCK // 2,
        )
    else:
        winner = _best_of(peaks, marks, best, vocab, is_drawn, highest, temperature)
    tl.store(chosen + row, tl.where(is_healthy, winner, -1).to(tl.int64))
    tl.store(arrived + row, 0)
