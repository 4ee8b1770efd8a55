"""Split PEFT's stacked A and B of all experts of a layer; see `adapters.experts`."""

from __future__ import annotations

import torch

from adapters.experts import Stack


def unstack(a: torch.Tensor, b: torch.Tensor, stack: Stack) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous A [experts, rank, in] and B [experts, out, rank] from a file's stacked matrices.

    Where gate and up are one matrix, the result has the gate's rows before those of up, however the base orders them.

    Args:
        a, b: [experts * rank, in] and [out, rank * experts], or, swapped, [experts * rank, out] and [in, rank *
            experts].
    """
    by_expert = a.unflatten(0, (stack.num_experts, -1))
    by_rank = b.unflatten(1, (-1, stack.num_experts))
    if stack.is_swapped:
        return by_rank.permute(2, 1, 0).contiguous(), by_expert.transpose(1, 2).contiguous()
    if stack.is_paired:
        by_rank = by_rank.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    return by_expert, by_rank.permute(2, 0, 1).contiguous()
