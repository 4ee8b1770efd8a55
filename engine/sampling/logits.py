"""The temperature of logits."""

from __future__ import annotations

import torch


def scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature, for temperatures [rows, 1] above zero.

    The maximum is subtracted first, and temperatures are at least 1e-30: a tiny one gives 0 and huge negative numbers.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-30)
