"""A mixture of experts: a router chooses a few of many feed-forward layers per token and weights their outputs.

    p = softmax(logits)                          [rows, experts], in float32
    c = the `chosen` experts of the largest p, the first of equal ones
    w = p[c], or p[c] / sum of p[c] if weights are normed

    y[t] = sum over e in c[t] of  w[t, e] * D_e (a(G_e x[t]) * U_e x[t])

Each product may have a per-expert bias.

An expert's inputs and intermediate results are rounded to the dtype of `x`; the sum is in float32 and rounded once. A
row's result does not depend on the other rows.

Sources: Shazeer et al., 2017 (sparsely-gated mixtures of experts, arXiv 1701.06538, section 2); Jiang et al., 2024
(Mixtral, arXiv 2401.04088, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional

from kernels.gated_activation.reference import Activation, activate_and_multiply

Part = Literal["gate_up", "down"]
Change = Callable[[Part, int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Changes a product of an expert in place, given (which product, the expert, its rows int64 [n] ascending, their inputs
[n, in], their outputs [n, out] including the bias)."""

GROUP_ROWS = 512
"""Maximum rows of a group, which are multiplied by an expert at once."""


def choose_experts(logits: torch.Tensor, chosen: int, *, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts for each row of `logits` [rows, experts].

    Returns the experts, int32 [rows, chosen], most likely first, and their weights, float32 [rows, chosen].
    """
    shares = logits.float().softmax(dim=-1)
    weights, experts = shares.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :chosen], experts[:, :chosen]
    if is_normed:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts.to(torch.int32), weights


def max_groups(num_pairs: int, num_experts: int) -> int:
    """Return the maximum number of groups that `sort_by_expert` makes of `num_pairs` (row, expert) pairs."""
    return min(num_pairs, num_experts) + num_pairs // GROUP_ROWS


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the (row, expert) pairs of `choose_experts` by expert, stably.

    Returns:
        The row of each pair in sorted order, int64 [pairs]; the sorted position of each pair, int32 [rows, chosen]; and
        groups of adjacent pairs with the same expert, (expert, first, pairs), int32 [max_groups, 3], padded with zeros.
    """
    flat = experts.flatten()
    order = flat.sort(stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(experts.shape)
    groups = torch.zeros(max_groups(len(flat), num_experts), 3, dtype=torch.int32)
    begin = index = 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        for start in range(0, count, GROUP_ROWS):
            size = min(GROUP_ROWS, count - start)
            groups[index] = torch.tensor([expert, begin, size])
            begin, index = begin + size, index + 1
    return order // experts.shape[1], places.to(torch.int32), groups


def multiply_by_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    change: Change | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts: [rows, hidden] in the dtype of `x`.

    Args:
        x: [rows, hidden].
        experts, weights: [rows, chosen], as `choose_experts` returns them.
        gate_up: [experts, 2 * inner, hidden], gate rows before up rows.
        down: [experts, hidden, inner].
        biases: of the two products, [experts, 2 * inner] and [experts, hidden]; None for none.
        change: applied to the first product before the activation, and to the second before the sum; None for no
            change.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        rows, places = torch.where(experts == expert)
        up_bias, down_bias = (None, None) if biases is None else (bias[expert] for bias in biases)
        own = x[rows]
        joint = functional.linear(own, gate_up[expert], up_bias)
        if change is not None:
            change("gate_up", expert, rows, own, joint)
        inner = activate_and_multiply(joint, activation)
        added = functional.linear(inner, down[expert], down_bias)
        if change is not None:
            change("down", expert, rows, inner, added)
        y.index_add_(0, rows, added.float() * weights[rows, places].unsqueeze(-1))
    return y.to(x.dtype)
