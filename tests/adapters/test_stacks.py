from __future__ import annotations

import pytest
import torch

from adapters.experts import Stack
from adapters.stacks import unstack

COUNT, RANK, IN, OUT = 3, 2, 5, 8


@pytest.mark.parametrize("swapped", [False, True])
def test_the_change_of_each_expert_is_what_peft_defines(swapped: bool) -> None:
    """By the two formulas of `ParamWrapper.get_delta_weight`, 0.21's and that of 0.18 for [experts, out, in]."""
    torch.manual_seed(0)
    width, height = (OUT, IN) if swapped else (IN, OUT)
    a, b = torch.randn(COUNT * RANK, width), torch.randn(height, RANK * COUNT)
    by_expert, by_rank = a.reshape(COUNT, -1, width), b.reshape(height, -1, COUNT)
    formula = "o r e, e r i -> e i o" if swapped else "o r e, e r i -> e o i"
    own_a, own_b = unstack(a, b, Stack(COUNT, is_paired=False, is_swapped=swapped))
    assert own_a.shape == (COUNT, RANK, IN)
    assert own_b.shape == (COUNT, OUT, RANK)
    assert own_a.is_contiguous()
    assert own_b.is_contiguous()
    torch.testing.assert_close(own_b @ own_a, torch.einsum(formula, by_rank, by_expert))


def test_outputs_that_stand_in_turn_come_one_below_the_other() -> None:
    a, b = torch.randn(COUNT * RANK, IN), torch.randn(OUT, RANK * COUNT)
    _, plain = unstack(a, b, Stack(COUNT, is_paired=False, is_swapped=False))
    _, paired = unstack(a, b, Stack(COUNT, is_paired=True, is_swapped=False))
    assert torch.equal(paired, torch.cat((plain[:, ::2], plain[:, 1::2]), dim=1))
