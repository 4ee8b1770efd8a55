"""What tokens lose for repeating, by comparing everything with everything: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.request import DryPenalty, LzPenalty


def dry(penalty: DryPenalty, context: Sequence[int]) -> dict[int, float]:
    window = list(context) if penalty.last_n < 0 else list(context)[max(0, len(context) - penalty.last_n) :]
    lost: dict[int, float] = {}
    for place in range(1, len(window)):
        token = window[place]
        length = 0
        while length < place and window[place - 1 - length] == window[-1 - length]:
            # Read in the whole context: a breaker may begin before the window.
            if breaks(penalty, context[: len(context) - length]):
                break
            length += 1
        if length >= penalty.allowed_length and (token,) not in penalty.breakers:
            loss = penalty.multiplier * penalty.base ** (length - penalty.allowed_length)
            lost[token] = max(lost.get(token, 0.0), loss)
    return lost


def breaks(penalty: DryPenalty, front: Sequence[int]) -> bool:
    return any(tuple(front[len(front) - len(word) :]) == word for word in penalty.breakers if len(word) <= len(front))


def lz(penalty: LzPenalty, output: Sequence[int], vocab_size: int) -> dict[int, float]:
    window = list(output)[-penalty.lookback :]
    found: dict[int, tuple[int, int]] = {}
    for place, token in enumerate(window):
        length = 0
        while length < min(place, penalty.buffer) and window[place - 1 - length] == window[-1 - length]:
            length += 1
        found[token] = max(found.get(token, (0, 0)), (length, place))
    return {
        token: penalty.strength * max(0.0, math.log2(vocab_size) - math.log2(len(window) - place))
        for token, (_, place) in found.items()
    }
