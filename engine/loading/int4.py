"""Weights that a checkpoint has in 4 bits already: unpacked to levels, of which a device makes what it multiplies by.

    W[o, i] = scale[g, o] * (level[o, i] - zero[g, o]),        g = i // group

    AWQ     qweight [in, out / 8]    eight outputs in a number, in the order 0 2 4 6 1 3 5 7 from the lowest bits on
            qzeros  [groups, out / 8]    the same
    GPTQ    qweight [in / 8, out]    eight inputs in a number, in their order
            qzeros  [groups, out / 8]    eight outputs, in their order; less one, save in its second format
    compressed-tensors
            weight_packed      [out, in / 8]      eight inputs, in their order
            weight_zero_point  [out / 8, groups]  eight outputs, in their order; where there is none, it is 8

Sources: Lin et al., 2023 (AWQ, arXiv 2306.00978), Frantar et al., 2022 (GPTQ, arXiv 2210.17323); the packing is that of
AutoAWQ's "gemm" version and of AutoGPTQ, as checkpoints on the Hugging Face hub have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.decoder.stored_fields import COMPRESSED
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from kernels.streamed_linear.reference import Int4Matrix, pack_int4

MIDDLE = 8
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight outputs lies in a number: the inverse of the order above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A weight [out, in] in 4 bits, on its way to a layout.

    Attributes:
        levels: uint8 [out, in], 0 to 15.
        scales: [in / group, out], of the type that they are stored in.
        zeros: int32 [in / group, out], 0 to 16.
        dtype: of the numbers that it is to stand for.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.levels.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.levels.device

    def dense(self) -> torch.Tensor:
        """Return the numbers, multiplied in float32 and rounded once."""
        out, depth = self.shape
        steps = self.levels.view(out, len(self.scales), -1).float() - self.zeros.t().unsqueeze(-1)
        return (steps * self.scales.float().t().unsqueeze(-1)).view(out, depth).to(self.dtype)

    def rows(self, start: int, end: int) -> Int4Weight:
        """Return some rows, which stay where they are."""
        scales, zeros = self.scales[:, start:end], self.zeros[:, start:end]
        return Int4Weight(levels=self.levels[start:end], scales=scales, zeros=zeros, dtype=self.dtype)

    def packed(self) -> Int4Matrix:
        """Return the layout of the GPU's kernel, whose scales are of `dtype`, one of 16 bits."""
        return pack_int4(self.levels, self.scales.to(self.dtype), self.zeros)


def read_int4(
    read: Callable[[str], torch.Tensor], module: str, stored: StoredInt4, dtype: torch.dtype
) -> Int4Weight | torch.Tensor:
    """Unpack the weight of one linear module whose tensors `read` returns by name; as numbers where it does not stay.

    Raises:
        CheckpointError: an input is of a group that is not there.
    """
    weight = _unpacked(read, module, stored, dtype)
    if stored.stays:
        return weight
    order = read(f"{module}.{stored.order}")
    if not 0 <= int(order.min()) <= int(order.max()) < len(weight.scales):
        raise CheckpointError(f"{module}.{stored.order} names groups of which there are {len(weight.scales)}.")
    zeros, scales = (each.t().float().index_select(1, order) for each in (weight.zeros, weight.scales))
    return ((weight.levels.float() - zeros) * scales).to(dtype)


def _unpacked(read: Callable[[str], torch.Tensor], module: str, stored: StoredInt4, dtype: torch.dtype) -> Int4Weight:
    if stored.method == COMPRESSED:
        return _read_compressed(read, module, stored, dtype)
    packed, zeros, scales = (read(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
    if stored.method == "awq":
        levels, zeros = unpack(packed, AWQ_PLACES).t(), unpack(zeros, AWQ_PLACES)
    else:
        levels, zeros = unpack(packed.t(), IN_ORDER), unpack(zeros, IN_ORDER)
    offset = zeros.to(torch.int32) + stored.zero_offset
    return Int4Weight(levels=levels.contiguous(), scales=scales, zeros=offset, dtype=dtype)


def _read_compressed(
    read: Callable[[str], torch.Tensor], module: str, stored: StoredInt4, dtype: torch.dtype
) -> Int4Weight:
    scales = read(f"{module}.weight_scale").t().contiguous()
    if stored.has_zeros:
        zeros = unpack(read(f"{module}.weight_zero_point").t(), IN_ORDER).to(torch.int32)
    else:
        zeros = torch.full(scales.shape, MIDDLE, dtype=torch.int32, device=scales.device)
    return Int4Weight(levels=unpack(read(f"{module}.weight_packed"), IN_ORDER), scales=scales, zeros=zeros, dtype=dtype)


def stack_int4(parts: Sequence[Int4Weight]) -> Int4Weight:
    """Put weights that read the same input one above the other."""
    return Int4Weight(
        levels=torch.cat([part.levels for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat([part.zeros for part in parts], dim=1),
        dtype=parts[0].dtype,
    )


def unpack(packed: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return uint8 [rows, 8 * n] of int32 [rows, n]; the number i of eight lies at bit 4 * places[i]."""
    out = torch.empty(*packed.shape, len(places), dtype=torch.uint8, device=packed.device)
    for index, place in enumerate(places):
        out[..., index] = (packed >> 4 * place) & 15
    return out.flatten(-2)
