"""Loads FP8 (e4m3) weights.

    W[o, i] = scale * w8[o, i]        one scale per tensor, per output o, or per block that contains (o, i)

Static input scales in a checkpoint are ignored: the engine quantizes inputs per row. Source: Micikevicius et al., 2022
(arXiv 2209.05433); names and shapes as in checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.decoder.stored_fp8 import StoredFp8
from engine.loading.numbers import Read
from kernels.streamed_linear.reference import Fp8Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A loaded FP8 weight [out, in], not yet in a device's layout.

    Attributes:
        held: e4m3 [out, in].
        scales: float32 [out].
        dtype: of the dequantized weight.
    """

    held: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.held.shape

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.held.device

    def dense(self) -> torch.Tensor:
        """Return the dequantized weight, computed in float32 and rounded once."""
        return (self.held.float() * self.scales.unsqueeze(1)).to(self.dtype)

    def rows(self, start: int, end: int) -> Fp8Weight:
        """Return a view of some rows."""
        return Fp8Weight(held=self.held[start:end], scales=self.scales[start:end], dtype=self.dtype)

    def matrix(self) -> Fp8Matrix:
        """Return the operand of FP8 matmuls."""
        return Fp8Matrix.of(self.held, self.scales)


def read_fp8(read: Read, module: str, stored: StoredFp8, dtype: torch.dtype) -> Fp8Weight | torch.Tensor:
    """Return the weight of one linear module; `read` returns its tensors by name.

    Dequantizes it unless a GPU multiplies by it as stored.
    """
    held = read(f"{module}.weight")
    scales = read(f"{module}.{stored.scale}").float()
    if stored.block is None:
        weight = Fp8Weight(held=held, scales=scales.flatten().expand(len(held)).contiguous(), dtype=dtype)
        return weight if stored.stays else weight.dense()
    rows, columns = stored.block
    spread = scales.repeat_interleave(rows, dim=0)[: held.shape[0]].repeat_interleave(columns, dim=1)
    return (held.float() * spread[:, : held.shape[1]]).to(dtype)


def stack_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Stack weights that read the same input along their output rows."""
    return Fp8Weight(
        held=torch.cat([part.held for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        dtype=parts[0].dtype,
    )
