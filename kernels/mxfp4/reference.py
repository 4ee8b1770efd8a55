"""MXFP4 weights as the GPU kernels hold them: 4-bit elements (e2m1), 32 of which share a power-of-two scale.

    W[o, i] = 2^(exponent[o, i // 32] - 127) * E2M1[level[o, i]]

    held   four 32-bit words per 32 inputs; word i holds inputs 2i and 2i + 1 of each eight, as a pair: the even
           one in its low half, the odd one in its high half. In each half, the digit is the pair's number, 0 to 3:

               0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2        from bit 15 down
               s  e  e  s  s  m  s  e  e  m  e  e  m  e  e  m

    units  a word per 128 inputs, one byte for each 32 of them, the first in the lowest byte: exponent + 126

A left shift by three bits moves the next pair to the place of the first, where sign, exponent and mantissa of two
bfloat16 are: one operation less per pair than with levels in sequence. The value of these bits is W / 2^(exponent - 1),
even if it is subnormal, and a unit is the exponent field, of bfloat16 and float32, of the factor that restores W: one
product, exact in both. Exponents above `MAX_EXPONENT` have no such unit; weights with such exponents cannot be packed.

Source: Open Compute Project, 2023 (OCP Microscaling Formats specification 1.0, sections 5.2 and 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP, BLOCK = 32, 128
"""Inputs that share an exponent, and inputs that share a word of units."""
EXPONENT_OFFSET, MAX_EXPONENT = 126, 128
BYTES_PER_WEIGHT = 0.5 + 1 / GROUP
PAIRS = 4
"""Pairs in each half of a word."""
WHOLE = ((6, 12), (3, 9), (0, 6))
"""For the first three pairs: left shifts of exponent and mantissa, and of the sign."""
_ROWS = 4096
"""Rows laid out at once; temporaries take eight times their memory."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A matrix [out, in] in 4 bits per element.

    Attributes:
        held: int32 [out, in / 8].
        units: int32 [out, in / 128, rounded up].
        dtype: of the dequantized weights.
    """

    held: torch.Tensor
    units: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.held.shape[0], 8 * self.held.shape[1]


def can_pack(exponents: torch.Tensor) -> bool:
    """Return whether all exponents have a unit. Those without one stand for scales above 2, or NaN."""
    return not bool((exponents > MAX_EXPONENT).any())


def pack_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> Mxfp4Matrix:
    """Lay out a checkpoint's tensors, some rows at a time.

    Args:
        blocks: uint8 [out, in / 2], two levels per byte, the first in the low bits; `GROUP` divides the inputs.
        exponents: uint8 [out, in / 32], for which `can_pack` holds.
        dtype: of the dequantized weights.
    """
    (out, half), num_groups = blocks.shape, exponents.shape[1]
    held = torch.empty(out, half // 4, dtype=torch.int32, device=blocks.device)
    units = torch.zeros(out, -(-num_groups // 4) * 4, dtype=torch.uint8, device=blocks.device)
    for start in range(0, out, _ROWS):
        rows = slice(start, start + _ROWS)
        held[rows] = _words_of(blocks[rows])
        units[rows, :num_groups] = exponents[rows] + EXPONENT_OFFSET
    return Mxfp4Matrix(held, units.view(torch.int32), dtype)


def _words_of(blocks: torch.Tensor) -> torch.Tensor:
    """Return the words, int32 [rows, in / 8], of blocks as in `pack_mxfp4`."""
    levels = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(len(blocks), -1, PAIRS, 4, 2)
    # [rows, groups, words, halves, pairs]
    pairs = levels.permute(0, 1, 3, 4, 2).to(torch.int32)
    halves = torch.zeros(pairs.shape[:-1], dtype=torch.int32, device=blocks.device)
    for pair, (left, sign_left) in enumerate(WHOLE):
        level = pairs[..., pair]
        halves |= (level & 7) << left | (level & 8) << sign_left
    last = pairs[..., -1]
    halves |= (last & 6) << 12 | (last & 8) << 8 | (last & 1) << 10
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)
