"""Matrices as they were before they were laid out for a kernel."""

from __future__ import annotations

import torch

from engine.loading.mxfp4 import BIAS
from kernels.mxfp4.reference import EXPONENT_OFFSET, GROUP, WHOLE, Mxfp4Matrix
from kernels.packed_linear_int4.reference import E2M1
from kernels.streamed_linear.reference import Fp8Matrix


def from_panels(panels: torch.Tensor, out: int, depth: int) -> torch.Tensor:
    """Undo `kernels.packed_linear.reference.to_panels`; return [out, depth]."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:out, :depth]


def from_fp8(matrix: Fp8Matrix) -> torch.Tensor:
    """Dequantize a matrix to [out, in] in float64."""
    return matrix.held.to(torch.float32).double() * (matrix.units.double() * matrix.limit).unsqueeze(-1)


def mxfp4_levels(held: torch.Tensor) -> torch.Tensor:
    """Return uint8 levels [out, in] of words [out, in / 8] as in `Mxfp4Matrix`."""
    words = held.view(len(held), -1, 4)
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)
    pairs = [halves >> left & 7 | halves >> sign_left & 8 for left, sign_left in WHOLE]
    pairs.append(halves >> 12 & 6 | halves >> 8 & 8 | halves >> 10 & 1)
    return torch.stack(pairs, dim=2).flatten(1).to(torch.uint8)


def from_mxfp4(matrix: Mxfp4Matrix) -> torch.Tensor:
    """Dequantize a matrix to [out, in] in its dtype: multiplied in float32, rounded once."""
    levels = mxfp4_levels(matrix.held)
    num_groups = levels.shape[1] // GROUP
    exponents = matrix.units.view(torch.uint8)[:, :num_groups].int() - EXPONENT_OFFSET
    scales = torch.ldexp(torch.ones(exponents.shape, device=levels.device), exponents - BIAS)
    numbers = torch.tensor(E2M1, device=levels.device)[levels.long()].view(*scales.shape, GROUP)
    return (numbers * scales.unsqueeze(-1)).flatten(1).to(matrix.dtype)
