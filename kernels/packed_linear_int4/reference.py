"""A linear product with 4-bit weights, in groups of inputs that share a scale and a zero point.

    y = x W^T + b,        W[o, i] = scale[o, g] * (level[o, i] - zero[o, g]),    g = i // group

Levels are integers from 0 to 15, zero points from 0 to 16. Inputs are not quantized and the integer differences are
exact: a group's sum is multiplied by its scale in float32, and only the result is rounded. An exception are processors
with AVX2 alone: of bfloat16 inputs, those that are small next to the largest of their group lose bits
(`kernels/level_pairs.h`).

Alternatively levels index the values of e2m1, without zero points: W[o, i] = scale[o, g] * E2M1[level[o, i]].

    panels    [out / 16][in / 8][16]    a 32-bit word holds eight inputs of an output: 0, 2, 4, 6 from the lowest bits
                                        up, 1, 3, 5, 7 from bit 16 up, so that pairs unpack into halves of bfloat16

Sources: as `kernels.streamed_linear.reference`, whose rounding this is; Open Compute Project, 2023 (OCP Microscaling
Formats specification 1.0, section 5.3: e2m1).
"""

from __future__ import annotations

import torch

from kernels.packed_linear.reference import in_steps
from kernels.streamed_linear.reference import round_to_levels

STEP = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of the eight inputs in a word, in units of 4 bits."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*POSITIVE, *(-number for number in POSITIVE))
"""The value of each of the 16 levels."""
GROUPS = (128, 64, 32)
"""Group sizes for weights quantized here, preferred first: the largest that divides the inputs is used."""


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
    """Quantize a matrix [out, in] with float32 scales; one of `GROUPS` must divide the number of inputs."""
    return round_to_levels(weight, group_of(weight.shape[1]), torch.float32)


def group_of(depth: int) -> int:
    """Return the group size used to quantize weights of `depth` inputs."""
    return next(group for group in GROUPS if depth % group == 0)


def to_int4_panels(levels: torch.Tensor) -> torch.Tensor:
    """Lay out levels [out, in] as int32 [panels, in / 8, 16]; `STEP` divides the number of inputs."""
    eights = in_steps(levels, levels.shape[1], STEP)
    panels = torch.zeros(eights.shape[:3], dtype=torch.int32)
    for index, place in enumerate(PLACES):
        panels |= eights[..., index].to(torch.int32) << 4 * place
    return panels


def beside_panels(numbers: torch.Tensor) -> torch.Tensor:
    """Lay out per-group values [out, groups], such as scales or zero points, as [panels, groups, 16]."""
    return in_steps(numbers, numbers.shape[1], 1).squeeze(-1).contiguous()
