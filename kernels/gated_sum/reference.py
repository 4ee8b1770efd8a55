"""A sum gated by the input: adds the shared expert's output in a mixture of experts.

    y[t] <- y[t] + sigmoid(g . x[t]) * d[t]

Computed in float32 and rounded once. Source: Qwen Team, 2024 (Qwen2, arXiv 2407.10671, section 2.2.2).
"""

from __future__ import annotations

import torch


def add_gated(y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, delta: torch.Tensor) -> None:
    """Add `delta` to `y`, both [rows, hidden], in place, times sigmoid of `x` [rows, hidden] @ `gate` [1, hidden]."""
    share = (x.float() @ gate.float().t()).sigmoid()
    y.copy_(y.float() + share * delta.float())
