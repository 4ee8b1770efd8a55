"""The parts of a draw: the scores that it chooses by, its random numbers, and the log-probabilities told of it.

A draw is a function of (seed, position) only, in any process, in any batch, on any device. The position of a draw is
that of the token it yields (prompt length plus outputs so far), so that a generation that moves to another replica in
mid-stream draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.placing import placed
from engine.request import TokenLogprobs
from kernels.token_choice.reference import DrawKeys, philox_4x32

_WORD = 0xFFFFFFFF


def scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature, for temperatures [rows, 1] above zero.

    The maximum is subtracted first, and temperatures are at least 1e-30: a tiny one gives 0 and huge negative numbers.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-30)


def draw_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> DrawKeys:
    """Pack seeds (any ints; their low 64 bits count) and positions (below 2^32) for one draw of each row."""
    words = [[seed & _WORD, seed >> 32 & _WORD, at] for seed, at in zip(seeds, positions, strict=True)]
    packed = placed(words, device)
    return DrawKeys(seed_low=packed[:, 0:1], seed_high=packed[:, 1:2], position=packed[:, 2:3])


def uniforms(keys: DrawKeys) -> torch.Tensor:
    """Return one number in (0, 1) for each row, float64 [rows, 1], independent of all tokens' noise."""
    zero = torch.zeros_like(keys.position)
    # A counter that the noise of tokens never uses: its third word is 0.
    words = philox_4x32((zero, keys.position, zero + 1, zero), keys.seed_low, keys.seed_high)
    return (words[0].double() + 0.5) / 2**32


def read_told(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """Convert the result of `kernels.token_logprobs.reference.tell`, once on the host."""
    count = (numbers.shape[1] - 2) // 2
    rows: list[list[float]] = numbers.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(map(int, top[:count]), top[count:], strict=True)), int(rank))
        for logprob, rank, *top in rows
    ]
