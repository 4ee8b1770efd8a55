"""Log-probabilities as returned to clients: of the model's own distribution, before any edit of the logits."""

from __future__ import annotations

import torch

from engine.request import TokenLogprobs
from engine.sampling.truncation import select_top_k


def tell(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the log-probabilities of one token per row as numbers for `read_told`, without waiting for a device.

    Args:
        logits: [rows, vocab] float32.
        token_ids: [rows] int64.
        num_top: how many of the likeliest tokens are returned besides; capped at the vocabulary's size.

    Returns:
        [rows, 2 + 2 n] float64; n is `num_top`, at most the vocabulary's size.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    if num_top == 0:
        return torch.cat((chosen.double(), ranks.double()), dim=1)
    top = select_top_k(logprobs, num_top)
    assert top.token_ids is not None
    # One tensor, for one copy to the host: a double represents every id and every float32.
    return torch.cat((chosen.double(), ranks.double(), top.token_ids.double(), top.scores.double()), dim=1)


def read_told(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """Convert the result of `tell`, once on the host."""
    count = (numbers.shape[1] - 2) // 2
    rows: list[list[float]] = numbers.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(map(int, top[:count]), top[count:], strict=True)), int(rank))
        for logprob, rank, *top in rows
    ]
