"""A product with weights of 4 bits, in groups of inputs that share a scale and a zero point.

    y = x W^T + b,        W[o, i] = scale[o, g] * (level[o, i] - zero[o, g]),    g = i // group

Levels are whole numbers from 0 to 15, zero points from 0 to 16. Inputs are as they are, and the differences of whole
numbers too: a group's sum is multiplied by its scale in float32, and only the result is rounded.

Or levels stand for the numbers of e2m1, and there is no zero point: W[o, i] = scale[o, g] * E2M1[level[o, i]].

    panels    [out / 16][in / 8][16]    a number of 32 bits is eight inputs of an output: 0, 2, 4, 6 from its lowest
                                        bits on, 1, 3, 5, 7 from the middle, where pairs of bfloat16 lie in two halves

Sources: as `kernels.streamed_linear.reference`, whose rounding this is; Open Compute Project, 2023 (OCP Microscaling
Formats specification 1.0, section 5.3: e2m1).
"""

from __future__ import annotations

import torch

from kernels.packed_linear.reference import in_steps
from kernels.streamed_linear.reference import round_to_levels

STEP = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight inputs lies in a number, in units of 4 bits."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*POSITIVE, *(-number for number in POSITIVE))
"""What each of 16 levels stands for."""
GROUPS = (128, 64, 32)
"""In which weights are rounded here: the widest that divides the inputs."""


def packed_linear_int4(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply x [rows, in] by uint8 levels [out, in], float32 scales and uint8 zero points [out, in / group].

    Returns [rows, out] as `x`.
    """
    out, depth = levels.shape
    steps = levels.view(out, scales.shape[1], -1).double() - zeros.double().unsqueeze(-1)
    y = x.double() @ (steps * scales.double().unsqueeze(-1)).view(out, depth).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def packed_linear_mxfp4(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply x [rows, in] by uint8 levels [out, in] of e2m1 and float32 scales [out, in / group].

    Returns [rows, out] as `x`.
    """
    out, depth = levels.shape
    numbers = torch.tensor(E2M1, dtype=torch.float64)[levels.long()].view(out, scales.shape[1], -1)
    y = x.double() @ (numbers * scales.double().unsqueeze(-1)).view(out, depth).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def to_levels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a matrix [out, in], of which one of `GROUPS` divides the inputs, with float32 scales."""
    return round_to_levels(weight, group_of(weight.shape[1]), torch.float32)


def group_of(depth: int) -> int:
    """Return how many of so many inputs share a scale where they are rounded here."""
    return next(group for group in GROUPS if depth % group == 0)


def to_int4_panels(levels: torch.Tensor) -> torch.Tensor:
    """Lay out levels [out, in], of which `STEP` divides the inputs; returns int32 [panels, in / 8, 16]."""
    eights = in_steps(levels, levels.shape[1], STEP)
    panels = torch.zeros(eights.shape[:3], dtype=torch.int32)
    for index, place in enumerate(PLACES):
        panels |= eights[..., index].to(torch.int32) << 4 * place
    return panels


def beside_panels(numbers: torch.Tensor) -> torch.Tensor:
    """Lay out what each group of an output has, [out, groups], as [panels, groups, 16]."""
    return in_steps(numbers, numbers.shape[1], 1).squeeze(-1).contiguous()
