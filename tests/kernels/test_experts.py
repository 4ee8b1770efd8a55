"""Mixtures of experts, held against what one row at a time computes."""

from __future__ import annotations

import pytest
import torch

from kernels.experts.reference import choose_experts, multiply_by_experts
from kernels.gated_activation.reference import activate_and_multiply


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_likeliest_experts_are_chosen_and_weighed(is_normed: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -1.0, -1.0, -1.0]])

    experts, weights = choose_experts(logits, 2, is_normed=is_normed)

    assert experts.tolist() == [[1, 3], [0, 1]]
    shares = logits.softmax(-1).gather(1, experts.long())
    expected = shares / shares.sum(-1, keepdim=True) if is_normed else shares
    assert torch.allclose(weights, expected)


def test_a_row_is_the_weighed_sum_of_its_experts() -> None:
    generator = torch.Generator().manual_seed(7)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((5, 8), (6, 2 * 12, 8), (6, 8, 12)))
    experts, weights = choose_experts(torch.randn(5, 6, generator=generator), 3, is_normed=False)

    y = multiply_by_experts(x, experts, weights, gate_up, down, "silu")

    for row, mine, shares in zip(range(5), experts.tolist(), weights, strict=True):
        parts = [down[e] @ activate_and_multiply(gate_up[e] @ x[row], "silu") for e in mine]
        expected = torch.stack(parts).mul(shares.unsqueeze(-1)).sum(0)
        assert torch.allclose(y[row], expected, rtol=1e-5, atol=1e-5)


def test_no_rows_add_nothing() -> None:
    experts, weights = choose_experts(torch.empty(0, 4), 2, is_normed=True)

    y = multiply_by_experts(torch.empty(0, 8), experts, weights, torch.ones(4, 6, 8), torch.ones(4, 8, 3), "silu")

    assert y.shape == (0, 8)
