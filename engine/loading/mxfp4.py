"""Weights that a checkpoint has in MXFP4: numbers of 4 bits (e2m1), 32 of which share a power of two (e8m0).

    W[o, i] = 2^(scale[o, i // 32] - 127) * E2M1[level[o, i]]

What comes of it has two bits that count, so that all types that are computed with hold it exactly, save float16 where a
scale is out of its range. Source: Open Compute Project, 2023 (OCP Microscaling Formats specification 1.0, sections 5.2
and 5.3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*POSITIVE, *(-number for number in POSITIVE))
"""What each of 16 levels stands for."""
BIAS = 127


def read_mxfp4(read: Callable[[str], torch.Tensor], module: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [experts, out, in] of experts whose tensors `read` returns by name.

    Those are `blocks` [experts, out, in / 32, 16] and `scales` [experts, out, in / 32], both uint8.
    """
    blocks, scales = read(f"{module}_blocks"), read(f"{module}_scales")
    experts, out = scales.shape[:2]
    levels = torch.tensor(E2M1, device=blocks.device)
    # [256, 2]: what the two numbers of a byte stand for.
    numbers_by_byte = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)
    numbers = torch.empty(experts, out, blocks[0, 0].numel() * 2, dtype=dtype, device=blocks.device)
    # One by one: on their way they take eight times as much.
    for whole, block, scale in zip(numbers, blocks, scales, strict=True):
        parts = numbers_by_byte.index_select(0, block.flatten().int()).view(*scale.shape, -1)
        whole.copy_(torch.ldexp(parts, scale.int().unsqueeze(-1) - BIAS).flatten(1))
    return numbers
