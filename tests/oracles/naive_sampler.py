"""The sampler, one row at a time in plain Python: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.request import SamplingParams
from tests.oracles import naive_repeats

WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers, straight from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & WORD, (p0 >> 32) ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def noise(seed: int, position: int, token: int) -> float:
    word = philox((token // 4, position, 0, 0), (seed & WORD, (seed >> 32) & WORD))[token % 4]
    v = min((word + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def edited(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int]
) -> list[float]:
    """Penalties, then the minimum length."""
    values = list(logits)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.dry is not None:
        for token, loss in naive_repeats.dry(params.dry, [*prompt, *output]).items():
            values[token] -= loss
    if params.lz is not None:
        for token, loss in naive_repeats.lz(params.lz, output, len(logits)).items():
            values[token] -= loss
    if len(output) < params.min_tokens:
        for token in stops:
            values[token] = -math.inf
    return values


def kept(values: Sequence[float], params: SamplingParams, uniform: float = 1.0) -> list[int]:
    """Tokens that survive all truncations, likeliest first; `values` are logits, `uniform` decides on XTC."""
    top = max(values)
    weight = [math.exp((value - top) / params.temperature) for value in values]
    tokens = sorted(range(len(values)), key=lambda i: (-weight[i], i))
    if params.top_n_sigma:
        there = [value for value in values if value > -math.inf]
        mean = sum(there) / len(there)
        sigma = math.sqrt(sum((value - mean) ** 2 for value in there) / len(there))
        tokens = [i for i in tokens if values[i] >= top - params.top_n_sigma * sigma]
    if params.top_k:
        tokens = tokens[: params.top_k]
    if params.top_p < 1:
        total, mass, cut = sum(weight[i] for i in tokens), 0.0, []
        for token in tokens:
            if cut and mass >= params.top_p * total:
                break
            cut.append(token)
            mass += weight[token]
        tokens = cut
    tokens = [i for i in tokens if weight[i] >= params.min_p * weight[tokens[0]]]
    if params.typical_p < 1:
        share = shares(weight, tokens)
        entropy = entropy_of(share)
        by_typicality = sorted(tokens, key=lambda i: abs(-math.log(share[i]) - entropy) if share[i] else math.inf)
        mass, cut = 0.0, []
        for token in by_typicality:
            if cut and mass >= params.typical_p:
                break
            cut.append(token)
            mass += share[token]
        tokens = [i for i in tokens if i in cut]
    if params.epsilon_cutoff:
        share = shares(weight, tokens)
        tokens = [i for i in tokens if share[i] >= params.epsilon_cutoff or share[i] == max(share.values())]
    if params.eta_cutoff:
        share = shares(weight, tokens)
        bound = min(params.eta_cutoff, math.sqrt(params.eta_cutoff) * math.exp(-entropy_of(share)))
        tokens = [i for i in tokens if share[i] >= bound or share[i] == max(share.values())]
    if uniform < params.xtc_probability:
        share = shares(weight, tokens)
        least = min((share[i] for i in tokens if share[i] >= params.xtc_threshold), default=math.inf)
        tokens = [i for i in tokens if share[i] <= least]
    return tokens


def shares(weight: Sequence[float], tokens: Sequence[int]) -> dict[int, float]:
    total = sum(weight[i] for i in tokens)
    return {i: weight[i] / total for i in tokens}


def entropy_of(share: dict[int, float]) -> float:
    return -sum(p * math.log(p) for p in share.values() if p)


def choose(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> int:
    values = edited(logits, params, prompt, output, {*eos, *params.stop_token_ids})
    if params.temperature == 0:
        return values.index(max(values))
    position = len(prompt) + len(output)
    uniform = (philox((0, position, 1, 0), (params.seed & WORD, (params.seed >> 32) & WORD))[0] + 0.5) / 2**32
    return max(
        kept(values, params, uniform), key=lambda i: values[i] / params.temperature + noise(params.seed, position, i)
    )
