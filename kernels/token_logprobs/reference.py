"""Log-probabilities as returned to clients: of the model's own distribution, before any edit of the logits."""

from __future__ import annotations

import torch


def tell(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return what `kernels.token_logprobs.launch.tell` does, by a sort."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1, keepdim=True) + 1
    # Stable: of equal ones, the lowest id comes first.
    likeliest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    top = logprobs.gather(1, likeliest)
    return torch.cat((chosen.double(), ranks.double(), likeliest.double(), top.double()), dim=1)
