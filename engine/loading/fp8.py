"""Weights that a checkpoint has in 8-bit floats (e4m3), each with a scale that it shares with others.

    W[o, i] = scale * w8[o, i]        one scale for the tensor, for the output o, or for the block that (o, i) lies in

Scales for inputs, where a checkpoint has some, are passed over: the engine's products round inputs by what each row
spans. Source: Micikevicius et al., 2022 (arXiv 2209.05433); names and shapes are those that checkpoints on the Hugging
Face hub have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.decoder.stored_fp8 import StoredFp8
from kernels.streamed_linear.reference import Fp8Matrix

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight [out, in] in 8-bit floats, on its way to a layout.

    Attributes:
        held: e4m3 [out, in].
        scales: float32 [out].
        dtype: of the numbers that it is to stand for.
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
        """Where it lies."""
        return self.held.device

    def dense(self) -> torch.Tensor:
        """Return the numbers, multiplied in float32 and rounded once."""
        return (self.held.float() * self.scales.unsqueeze(1)).to(self.dtype)

    def rows(self, start: int, end: int) -> Fp8Weight:
        """Return some rows, which stay where they are."""
        return Fp8Weight(held=self.held[start:end], scales=self.scales[start:end], dtype=self.dtype)

    def matrix(self) -> Fp8Matrix:
        """Return what products take."""
        return Fp8Matrix.of(self.held, self.scales)


def read_fp8(
    read: Callable[[str], torch.Tensor], module: str, stored: StoredFp8, dtype: torch.dtype
) -> Fp8Weight | torch.Tensor:
    """Return the weight of one linear module whose tensors `read` returns by name.

    It stays in 8 bits where there is something that multiplies by it; else it becomes numbers.
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
    """Put weights that read the same input one above the other."""
    return Fp8Weight(
        held=torch.cat([part.held for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        dtype=parts[0].dtype,
    )
