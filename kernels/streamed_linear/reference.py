"""Linear products of few rows, whose time is that of reading the weights: as they are, or in 4 bits each.

    y = x W^T + b,        W[o, i] = round(scale[g, o] * (level[o, i] - zero[g, o])),    g = i // 128

`level` and `zero` are whole numbers from 0 to 15. Each group of 128 inputs of an output has a scale and a zero point of
its own, by its smallest and largest weight and so that 0 stays 0; levels are rounded to the nearest. What W is rounded
to is the type of the inputs, so that weights are one set of numbers however they are multiplied by.

    held   byte j of a group's 64    level of input j in the low half, of input j + 64 in the high half

Sources: weights alone in 4 bits, by groups: Frantar et al., 2022 (GPTQ, arXiv 2210.17323, section 5), Lin et al., 2023
(AWQ, arXiv 2306.00978, section 2); the levels are those of plain rounding, which needs no examples of text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

GROUP = 128
"""Inputs that share a scale and a zero point."""
LEVELS = 15
BYTES_PER_WEIGHT = 0.5 + (2 + 1) / GROUP
"""With scales of two bytes."""


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A matrix [out, in] in 4 bits a number.

    Attributes:
        held: uint8 [out, in / 2].
        scales: bfloat16 or float16 [in / 128, out], the type of the weights that it stands for.
        zeros: uint8 [in / 128, out].
    """

    held: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.held.shape[0], 2 * self.held.shape[1]


def to_int4(weight: torch.Tensor) -> Int4Matrix:
    """Round a matrix [out, in], of which `GROUP` divides the inputs. A group that is not finite stays so."""
    out, depth = weight.shape
    grouped = weight.float().view(out, depth // GROUP, GROUP)
    low, high = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
    scales = ((high - low) / LEVELS).to(weight.dtype)
    # What is divided by is what will be multiplied by.
    steps = torch.where(scales == 0, 1, scales).float()
    zeros = (-low / steps).round().clamp(0, LEVELS)
    levels = (grouped / steps.unsqueeze(-1) + zeros.unsqueeze(-1)).round().nan_to_num().clamp(0, LEVELS).to(torch.uint8)
    first, second = levels.split(GROUP // 2, dim=-1)
    return Int4Matrix(
        (first | second << 4).view(out, depth // 2),
        scales.t().contiguous(),
        zeros.nan_to_num().to(torch.uint8).t().contiguous(),
    )


def from_int4(matrix: Int4Matrix) -> torch.Tensor:
    """Return the weights [out, in] that a matrix stands for, in the type of its scales."""
    out, depth = matrix.shape
    halves = matrix.held.view(out, depth // GROUP, GROUP // 2)
    levels = torch.cat((halves & LEVELS, halves >> 4), dim=-1)
    steps = levels.to(matrix.scales.dtype) - matrix.zeros.t().unsqueeze(-1)
    return (steps * matrix.scales.t().unsqueeze(-1)).view(out, depth)


def streamed_linear(x: torch.Tensor, weight: torch.Tensor | Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply `x` [rows, in] by a matrix [out, in] and add `bias` [out]; returns [rows, out] in the type of `x`."""
    return functional.linear(x, from_int4(weight) if isinstance(weight, Int4Matrix) else weight, bias)
