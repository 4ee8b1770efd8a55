"""Log-probabilities that a device has told."""

from __future__ import annotations

import torch

from engine.request import TokenLogprobs


def read_told(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """Convert the result of `kernels.token_logprobs.reference.tell`, once on the host."""
    count = (numbers.shape[1] - 2) // 2
    rows: list[list[float]] = numbers.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(map(int, top[:count]), top[count:], strict=True)), int(rank))
        for logprob, rank, *top in rows
    ]
