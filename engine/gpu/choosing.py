"""Sampling on a GPU in one kernel, without sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from engine.gpu.runtime import CudaRuntime
from engine.gpu.staging import Staging
from engine.request import SamplingParams
from kernels.token_choice.launch import choose_tokens, counters

_HALF = 1 << 63


class TokenChooser:
    """Chooses tokens for rows that are greedy or use only temperature, top-k, top-p and min-p."""

    def __init__(self, runtime: CudaRuntime, max_rows: int) -> None:
        self._runtime = runtime
        self._staging = Staging(6 * max_rows, runtime)
        self._params: Sequence[SamplingParams] = ()
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self._arrived = counters(max_rows, runtime.device)

    def __call__(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32; -1 where a row is unusable.

        A row with other truncation gets the token that it would draw without it. Callers never mutate `params`: what
        was derived from a sequence is reused for the same object.
        """
        rows = len(params)
        if params is not self._params:
            self._params = params
            knobs = [(p.temperature, _logarithm(p.min_p), p.top_k, p.top_p) for p in params]
            seeds = [(_signed(p.seed), 0) for p in params]
            parts = torch.tensor(knobs, dtype=torch.float64).view(torch.int64), torch.tensor(seeds, dtype=torch.int64)
            self._numbers = torch.cat([part.flatten() for part in parts])
        self._numbers[4 * rows + 1 :: 2] = torch.tensor(positions)
        self._staging.send(self._numbers)
        sent = self._staging.device
        knobs_sent, seeds_sent = sent[: 4 * rows].view(torch.float64).view(rows, 4), sent[4 * rows : 6 * rows]
        return choose_tokens(logits, knobs_sent, seeds_sent.view(rows, 2), self._arrived)

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying numbers to the host; return a function that waits for them."""
        return self._runtime.fetch(numbers)


def _logarithm(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _signed(seed: int) -> int:
    """Return the low 64 bits of a seed as a signed number."""
    return (seed + _HALF) % (2 * _HALF) - _HALF
