"""Log-probabilities as returned to clients: of the model's own distribution, before any edit of the logits."""

from __future__ import annotations

import torch


def tell(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the log-probabilities of one token per row, and of the likeliest ones, without waiting for a device.

    Args:
        logits: [rows, vocab] float32.
        token_ids: [rows] int64.
        num_top: how many of the likeliest tokens are returned besides; capped at the vocabulary's size.

    Returns:
        [rows, 2 + 2 n] float64; n is `num_top`, at most the vocabulary's size. Log-probability and rank of the token,
        ids of the likeliest tokens, and their log-probabilities.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    if num_top == 0:
        return torch.cat((chosen.double(), ranks.double()), dim=1)
    top = likeliest(logprobs.float(), num_top)
    # One tensor, for one copy to the host: a double represents every id and every float32.
    return torch.cat((chosen.double(), ranks.double(), top.double(), logprobs.gather(1, top).double()), dim=1)


def likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the highest scores of each row, or of all if there are fewer; highest first, equal ones by id.

    Score and id are packed into one integer that orders like the pair, because `topk` alone breaks ties differently on
    every device. A row with NaN gets meaningless ids, and raises no error that would fail the other rows.

    Args:
        scores: [rows, vocab] float32.

    Returns:
        [rows, n] int64; n is `count`, at most the vocabulary's size.
    """
    vocab_size = scores.shape[1]
    # Adding zero turns -0.0 into 0.0. Read as signed integers, floats of one sign sort by their bits: negative ones in
    # reverse, which flipping all bits but the sign undoes.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    descending_id = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32).bitwise_or_(descending_id)
    top = keys.sort(dim=-1, descending=True).values if count >= vocab_size else keys.topk(count, dim=-1).values
    return (vocab_size - 1) - top.bitwise_and_(0xFFFFFFFF)
