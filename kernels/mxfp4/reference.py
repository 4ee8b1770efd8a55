"""Weights in MXFP4 as the GPU's kernels hold them: numbers of 4 bits (e2m1), 32 of which share a power of two.

    W[o, i] = 2^(exponent[o, i // 32] - 127) * E2M1[level[o, i]]

    held   four words of 32 bits for each 32 inputs; word i has inputs 2i and 2i + 1 of each eight, two to a pair:
           the even ones in its low half, the odd ones in its high half. In each half, pair 0 to 3 by its digit:

               0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2        from bit 15 down
               s  e  e  s  s  m  s  e  e  m  e  e  m  e  e  m

    units  a word for each 128 inputs, a byte for each 32 of them, the first one's lowest: exponent + 126

A shift by three bits to the left brings the next pair to where the first one is, which is where sign, exponent and
mantissa are in two bfloat16: one operation less for each pair than if levels lay behind each other. Such a number is
W / 2^(exponent - 1), also where it is subnormal, and a unit is the exponent of bfloat16 and float32 that makes W of it:
one product, exact in both. Exponents above `MAX_EXPONENT` have no such unit; who has some needs numbers.

Source: Open Compute Project, 2023 (OCP Microscaling Formats specification 1.0, sections 5.2 and 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.packed_linear_int4.reference import E2M1

GROUP, BLOCK = 32, 128
"""Inputs that share an exponent, and a word of units."""
EXPONENT_OFFSET, MAX_EXPONENT, BIAS = 126, 128, 127
BYTES_PER_WEIGHT = 0.5 + 1 / GROUP
PAIRS = 4
"""Of a word."""
WHOLE = ((6, 12), (3, 9), (0, 6))
"""Of the first three pairs: by how many bits exponent and mantissa are moved to the left, and the sign."""
_ROWS = 4096
"""Laid out at once: on their way they take eight times as much."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A matrix [out, in] in 4 bits a number.

    Attributes:
        held: int32 [out, in / 8].
        units: int32 [out, in / 128, rounded up].
        dtype: of the numbers that it stands for.
    """

    held: torch.Tensor
    units: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.held.shape[0], 8 * self.held.shape[1]


def can_pack(exponents: torch.Tensor) -> bool:
    """Return whether all of some exponents have a unit. Others are of scales above 2, or of none."""
    return not bool((exponents > MAX_EXPONENT).any())


def pack_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> Mxfp4Matrix:
    """Lay out what a checkpoint has, some rows after the other.

    Args:
        blocks: uint8 [out, in / 2], two levels in a byte, the first one's bits lower; `GROUP` divides the inputs.
        exponents: uint8 [out, in / 32], for which `can_pack` holds.
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
    """Return int32 [rows, in / 8] of `pack_mxfp4`'s blocks."""
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


def levels_of(held: torch.Tensor) -> torch.Tensor:
    """Return uint8 levels [out, in] of words [out, in / 8]."""
    words = held.view(len(held), -1, 4)
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)
    pairs = [halves >> left & 7 | halves >> sign_left & 8 for left, sign_left in WHOLE]
    pairs.append(halves >> 12 & 6 | halves >> 8 & 8 | halves >> 10 & 1)
    return torch.stack(pairs, dim=2).flatten(1).to(torch.uint8)


def from_mxfp4(matrix: Mxfp4Matrix) -> torch.Tensor:
    """Return the weights [out, in] that a matrix stands for, in its type: multiplied in float32, rounded once."""
    levels = levels_of(matrix.held)
    num_groups = levels.shape[1] // GROUP
    exponents = matrix.units.view(torch.uint8)[:, :num_groups].int() - EXPONENT_OFFSET
    scales = torch.ldexp(torch.ones(exponents.shape, device=levels.device), exponents - BIAS)
    numbers = torch.tensor(E2M1, device=levels.device)[levels.long()].view(*scales.shape, GROUP)
    return (numbers * scales.unsqueeze(-1)).flatten(1).to(matrix.dtype)
