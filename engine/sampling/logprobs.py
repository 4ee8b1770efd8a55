"""Log-probabilities as they are told: of the model's own distribution, whatever the draw is then made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import TokenLogprobs
from engine.sampling.logits import select_top_k


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return what the model thought of one token for each row of `logits` [rows, vocab] float32.

    Args:
        num_top: how many of the likeliest tokens are told besides; at most the vocabulary's size.
    """
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    own: list[float] = chosen.squeeze(1).tolist()
    ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    if num_top == 0:
        return [TokenLogprobs(logprob, rank=rank) for logprob, rank in zip(own, ranks, strict=True)]
    top = select_top_k(logprobs, min(num_top, logits.shape[1]))
    assert top.token_ids is not None
    rows = zip(own, top.token_ids.tolist(), top.scores.tolist(), ranks, strict=True)
    return [TokenLogprobs(logprob, tuple(zip(ids, scores, strict=True)), rank) for logprob, ids, scores, rank in rows]
