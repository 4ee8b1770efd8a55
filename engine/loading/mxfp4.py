"""Loads MXFP4 weights: 4-bit floats (e2m1) in groups of 32 that share a power of two (e8m0).

    W[o, i] = 2^(exponent[o, i // 32] - 127) * E2M1[level[o, i]]

A value has two significant bits, so every compute dtype represents it exactly, except float16 if the exponent is out
of range. Source: Open Compute Project, 2023 (OCP Microscaling Formats specification 1.0, sections 5.2 and 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.loading.numbers import Read
from kernels.packed_linear_int4.reference import E2M1

BIAS = 127
GROUP_ROWS = 4096
"""Rows dequantized at once; intermediate tensors take several times the memory of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight:
    """A loaded MXFP4 weight [out, in], not yet in a device's layout.

    Attributes:
        blocks: uint8 [out, in / 2], two levels per byte, the first in the low bits.
        exponents: uint8 [out, in / 32].
        dtype: of the dequantized weight.
    """

    blocks: torch.Tensor
    exponents: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        out, half = self.blocks.shape
        return torch.Size((out, 2 * half))

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.blocks.device

    @property
    def levels(self) -> torch.Tensor:
        """4-bit indices into `E2M1`, uint8 [out, in]."""
        return torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1).flatten(-2)

    @property
    def scales(self) -> torch.Tensor:
        """Factors of each group, float32 [out, in / 32]."""
        return torch.ldexp(torch.ones_like(self.exponents, dtype=torch.float32), self.exponents.int() - BIAS)

    def dense(self) -> torch.Tensor:
        """Return the dequantized weight."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        numbers = torch.tensor(E2M1, device=self.device)
        for start in range(0, len(whole), GROUP_ROWS):
            part = self.rows(start, start + GROUP_ROWS)
            scales = part.scales
            steps = numbers.index_select(0, part.levels.flatten().int()).view(*scales.shape, -1)
            whole[start : start + GROUP_ROWS] = (steps * scales.unsqueeze(-1)).flatten(1)
        return whole

    def rows(self, start: int, end: int) -> Mxfp4Weight:
        """Return a view of some rows."""
        return Mxfp4Weight(blocks=self.blocks[start:end], exponents=self.exponents[start:end], dtype=self.dtype)


def read_mxfp4(read: Read, module: str, dtype: torch.dtype) -> Mxfp4Weight:
    """Return the experts stacked along their output rows; `read` returns their tensors by name.

    The tensors are `blocks` [experts, out, in / 32, 16] and `scales` [experts, out, in / 32], both uint8.
    """
    blocks, scales = read(f"{module}_blocks"), read(f"{module}_scales")
    return Mxfp4Weight(blocks=blocks.flatten(2).flatten(0, 1), exponents=scales.flatten(0, 1), dtype=dtype)
