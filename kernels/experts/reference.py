"""A mixture of experts: a router chooses a few of many feed-forward layers for each token, and weighs what they add.

    p = softmax(logits)                          [rows, experts], in float32
    c = the `chosen` experts of the largest p, of equal ones the first
    w = p[c], or p[c] / sum of p[c] where they are normed

    y[t] = sum over e in c[t] of  w[t, e] * D_e (a(G_e x[t]) * U_e x[t])

What an expert reads and what it hands from one product to the next are rounded to the dtype of `x`; the sum is taken in
float32 and rounded once. A row's result does not depend on the other rows.

Sources: Shazeer et al., 2017 (sparsely-gated mixtures of experts, arXiv 1701.06538, section 2); Jiang et al., 2024
(Mixtral, arXiv 2401.04088, section 2.1).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.gated_activation.reference import Activation, activate_and_multiply


def choose_experts(logits: torch.Tensor, chosen: int, *, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose for each row of `logits` [rows, experts].

    Returns the experts, int32 [rows, chosen], from the likeliest on, and their weights, float32 [rows, chosen].
    """
    shares = logits.float().softmax(dim=-1)
    weights, experts = shares.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :chosen], experts[:, :chosen]
    if is_normed:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts.to(torch.int32), weights


def multiply_by_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """Return what the experts of each row add: [rows, hidden] as `x`.

    Args:
        x: [rows, hidden].
        experts, weights: [rows, chosen], as `choose_experts` returns them.
        gate_up: [experts, 2 * inner, hidden], rows of the gate before those of the other.
        down: [experts, hidden, inner].
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        rows, places = torch.where(experts == expert)
        inner = activate_and_multiply(functional.linear(x[rows], gate_up[expert]), activation)
        added = functional.linear(inner, down[expert]).float()
        y.index_add_(0, rows, added * weights[rows, places].unsqueeze(-1))
    return y.to(x.dtype)
