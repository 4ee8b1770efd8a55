"""Linear products of few rows, which are bound by reading the weights: unquantized, FP8 or int4.

    y = x W^T + b,        W[o, i] = round(scale[g, o] * (level[o, i] - zero[g, o])),    g = i // group

`level` and `zero` are integers from 0 to 15. Each group of inputs of an output has its own scale and zero point.
Weights quantized here have groups of 128, scales that cover a group's smallest and largest weight and 0, which stays
exact, and round to the nearest level. W is rounded to the dtype of the inputs, except by the kernel of few rows, which
multiplies sums of level - zero by the scale.

    held   word j of a block's 16    level of input 32 p + 2 j of 128 from bit 4 p on, of input 32 p + 2 j + 1 from bit
                                     16 + 4 p on, p from 0 to 3
    unit   a word for a group        the scale's bits in the low half, those of 2^n + zero above, as in `BITS_BY_DTYPE`

A shift and a mask by a word of units thus make two numbers of 16 bits, 2^n + level, from a word of levels.

With FP8 weights (e4m3), inputs are quantized to FP8 dynamically too, except in products of one or two rows:

    y[t, o] = (x8[t] . w8[o]) * span(x[t]) * unit[o] + b[o],        W[o, i] = w8[o, i] * unit[o] * limit

A row's span is that of `kernels.row_quantization.reference`; the division by its limit is folded into the weights'
unit. A large input or weight costs precision only in its own row.

Sources: grouped weight-only 4-bit quantization: Frantar et al., 2022 (GPTQ, arXiv 2210.17323, section 5), Lin et al.,
2023 (AWQ, arXiv 2306.00978, section 2); levels here are rounded to nearest, which needs no calibration text. FP8:
Micikevicius et al., 2022 (arXiv 2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch.nn import functional

from kernels.row_quantization.reference import LIMIT_BY_DTYPE, quantize_rows
from kernels.streamed_linear.layout import BLOCK, GROUP, LEVELS, PAIRS

FP8 = torch.float8_e4m3fn
BITS_BY_DTYPE = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of 2^n, 128 or 1024, whose last four mantissa bits are worth 8, 4, 2 and 1."""


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A matrix [out, in] in 4 bits per element.

    Attributes:
        held: int32 [out, in / 8].
        units: int32 [in / group, out].
        dtype: bfloat16 or float16, of the scales and of the dequantized weights.
    """

    held: torch.Tensor
    units: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.held.shape[0], 8 * self.held.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale: one of `SHORT_GROUPS`, or a multiple of `BLOCK`."""
        return self.shape[1] // self.units.shape[0]

    @property
    def scales(self) -> torch.Tensor:
        """[in / group, out] in `dtype`."""
        return self.units.to(torch.int16).view(self.dtype)

    @property
    def zeros(self) -> torch.Tensor:
        """[in / group, out], integers in `dtype`."""
        return (self.units >> 16 & 0xFF).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [out, in] in FP8.

    Attributes:
        held: e4m3 [out, in].
        units: float32 [out], the scales divided by `limit`.
    """

    held: torch.Tensor
    units: torch.Tensor

    @classmethod
    def of(cls, held: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """Make a matrix of e4m3 [out, in] and per-output scales, float32 [out]."""
        return cls(held, scales / LIMIT_BY_DTYPE[held.dtype])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.held.shape[0], self.held.shape[1]

    @property
    def limit(self) -> float:
        """The largest number of its dtype."""
        return LIMIT_BY_DTYPE[self.held.dtype]


Matrix = torch.Tensor | Int4Matrix | Fp8Matrix


def to_int4(weight: torch.Tensor) -> Int4Matrix:
    """Quantize a matrix [out, in]; `GROUP` divides the inputs. A group that is not finite stays so."""
    levels, scales, zeros = round_to_levels(weight, GROUP, weight.dtype)
    return pack_int4(levels, scales.t(), zeros.t().to(torch.int32))


def round_to_levels(
    weight: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels (uint8 [out, in]), scales (`dtype` [out, in / group]) and zero points (uint8, as scales).

    Scales cover a group's smallest and largest weight and 0, which stays exact. A group that is not finite stays so.
    """
    out, depth = weight.shape
    grouped = weight.float().view(out, depth // group, group)
    low, high = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
    scales = ((high - low) / LEVELS).to(dtype)
    # Divides by the rounded scale, which dequantization multiplies by.
    steps = torch.where(scales == 0, 1, scales).float()
    zeros = (-low / steps).round().clamp(0, LEVELS)
    # In place, because for many experts' matrices memory traffic dominates.
    levels = (grouped / steps.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).round_().nan_to_num_().clamp_(0, LEVELS)
    return levels.to(torch.uint8).view(out, depth), scales, zeros.nan_to_num().to(torch.uint8)


def pack_int4(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Int4Matrix:
    """Lay out uint8 levels [out, in], and scales of bfloat16 or float16 and int32 zero points, both [in / group, out].

    `BLOCK` divides the inputs.
    """
    out, depth = levels.shape
    # [..., p, j, i] is the level of input 32 p + 2 j + i.
    parts = levels.view(out, depth // BLOCK, PAIRS, BLOCK // 8, 2)
    held = torch.zeros(out, depth // BLOCK, BLOCK // 8, dtype=torch.int32, device=levels.device)
    for pair, half in product(range(PAIRS), range(2)):
        held |= parts[:, :, pair, :, half].to(torch.int32) << 4 * pair + 16 * half
    bits = scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    units = bits | BITS_BY_DTYPE[scales.dtype] + zeros.contiguous() << 16
    return Int4Matrix(held.view(out, depth // 8), units, scales.dtype)


def from_int4(matrix: Int4Matrix) -> torch.Tensor:
    """Dequantize a matrix to [out, in] in the dtype of its scales."""
    out, depth = matrix.shape
    words = matrix.held.view(out, depth // BLOCK, 1, BLOCK // 8, 1)
    shifts = torch.tensor([[4 * pair, 16 + 4 * pair] for pair in range(PAIRS)], device=words.device)
    levels = (words >> shifts.view(PAIRS, 1, 2) & LEVELS).view(out, -1, matrix.group)
    steps = levels.to(matrix.dtype) - matrix.zeros.t().unsqueeze(-1)
    return (steps * matrix.scales.t().unsqueeze(-1)).view(out, depth)


def to_fp8(weight: torch.Tensor) -> Fp8Matrix:
    """Quantize a matrix [out, in] to FP8 with a scale per output. An output that is not finite stays so."""
    held, spans = quantize_rows(weight, FP8)
    return Fp8Matrix.of(held, spans / LIMIT_BY_DTYPE[FP8])


def streamed_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply `x` [rows, in] by a matrix [out, in] and add `bias` [out]; return [rows, out] in the dtype of `x`."""
    if not isinstance(weight, Fp8Matrix):
        return functional.linear(x, from_int4(weight) if isinstance(weight, Int4Matrix) else weight, bias)
    held, spans = quantize_rows(x, weight.held.dtype)
    product = functional.linear(held.to(torch.float32), weight.held.to(torch.float32))
    product *= spans.unsqueeze(-1) * weight.units
    return (product if bias is None else product + bias).to(x.dtype)
