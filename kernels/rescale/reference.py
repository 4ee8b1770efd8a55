"""Scales by one factor and, optionally, applies a soft cap to the result.

    x[i] <- factor * x[i],    or    softcap * tanh(factor * x[i] / softcap)

Source: Gemma Team, 2024 (Gemma 2, arXiv 2408.00118, section 2), for the cap.
"""

from __future__ import annotations

import torch


def rescale(x: torch.Tensor, factor: float, softcap: float = 0.0) -> None:
    """Rescale `x` [rows, width] in place; a `softcap` of 0 means none."""
    if softcap:
        x.mul_(factor / softcap).tanh_().mul_(softcap)
    else:
        x.mul_(factor)
