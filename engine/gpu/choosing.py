"""The choice of tokens on a GPU by one kernel, for rows that need no sorted candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from engine.gpu.runtime import GpuRuntime
from engine.request import SamplingParams
from kernels.token_choice.launch import choose_tokens

_HALF = 1 << 63


class TokenChooser:
    """Chooses for rows that are greedy, or draw from all tokens or from those within min-p."""

    def __init__(self, runtime: GpuRuntime, max_rows: int) -> None:
        self._runtime = runtime
        self._host = runtime.staging(4 * max_rows)
        self._device = torch.zeros_like(self._host, device=runtime.device)
        self._max_rows = max_rows
        self._wait: Callable[[], None] = lambda: None

    def __call__(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32; -1 where a row is unusable.

        Rows that need more than this get the token that they would draw without it.
        """
        self._wait()
        half = 2 * self._max_rows
        knobs, seeds = self._host[:half].view(torch.float64).view(-1, 2), self._host[half:].view(-1, 2)
        rows = len(params)
        knobs[:rows] = torch.tensor([(p.temperature, _logarithm(p.min_p)) for p in params], dtype=torch.float64)
        seeds[:rows] = torch.tensor([(_signed(p.seed), at) for p, at in zip(params, positions, strict=True)])
        self._device.copy_(self._host, non_blocking=True)
        self._wait = self._runtime.fence()
        return choose_tokens(
            logits,
            self._device[:half].view(torch.float64).view(-1, 2),
            self._device[half:].view(-1, 2),
        )


def _logarithm(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _signed(seed: int) -> int:
    """Return the signed number with the low 64 bits of a seed."""
    return (seed + _HALF) % (2 * _HALF) - _HALF
