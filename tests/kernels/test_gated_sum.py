from __future__ import annotations

import torch

from kernels.gated_sum.reference import add_gated


def test_a_closed_gate_adds_nothing_and_an_open_one_all() -> None:
    y, x, delta = torch.ones(2, 3), torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]), torch.full((2, 3), 5.0)
    add_gated(y, x, torch.tensor([[100.0, 0.0, 0.0]]), delta)
    torch.testing.assert_close(y, torch.tensor([[6.0] * 3, [1.0] * 3]))
