"""Loads 4-bit weights: unpacks them to levels, which a device then packs in its own layout.

    W[o, i] = scale[g, o] * (level[o, i] - zero[g, o]),        g = i // group

    AWQ     qweight [in, out / 8]    eight outputs per int32, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
            qzeros  [groups, out / 8]    the same
    GPTQ    qweight [in / 8, out]    eight inputs per int32, in order
            qzeros  [groups, out / 8]    eight outputs, in order; except in gptq_v2, each int32 is less 0x11111111,
                                         so that a zero point of 0 borrows from the next
    compressed-tensors
            weight_packed      [out, in / 8]      eight inputs, in order
            weight_zero_point  [out / 8, groups]  eight outputs, in order; 8 if the tensor is absent

Sources: Lin et al., 2023 (AWQ, arXiv 2306.00978), Frantar et al., 2022 (GPTQ, arXiv 2210.17323); the packing is that of
AutoAWQ's "gemm" version and of GPTQModel (with transformers), as in checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.decoder.stored_int4 import COMPRESSED, StoredInt4
from engine.errors import CheckpointError
from engine.loading.numbers import Read
from kernels.streamed_linear.reference import Int4Matrix, pack_int4

MIDDLE = 8
EACH_BY_ONE = 0x11111111
"""Adds one to each of the eight values in an int32."""
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight outputs within an int32: the inverse of the order above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A loaded 4-bit weight [out, in], not yet in a device's layout.

    Attributes:
        levels: uint8 [out, in], 0 to 15.
        scales: [in / group, out], in the stored dtype.
        zeros: int32 [in / group, out], 0 to 15.
        dtype: of the dequantized weight.
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
        """Device of the weight."""
        return self.levels.device

    def dense(self) -> torch.Tensor:
        """Return the dequantized weight, computed in float32 and rounded once."""
        out, depth = self.shape
        steps = self.levels.view(out, len(self.scales), -1).float() - self.zeros.t().unsqueeze(-1)
        return (steps * self.scales.float().t().unsqueeze(-1)).view(out, depth).to(self.dtype)

    def rows(self, start: int, end: int) -> Int4Weight:
        """Return a view of some rows."""
        scales, zeros = self.scales[:, start:end], self.zeros[:, start:end]
        return Int4Weight(levels=self.levels[start:end], scales=scales, zeros=zeros, dtype=self.dtype)

    def packed(self) -> Int4Matrix:
        """Pack for the GPU kernel; scales become `dtype`, which must be a 16-bit one."""
        return pack_int4(self.levels, self.scales.to(self.dtype), self.zeros)


def read_int4(read: Read, module: str, stored: StoredInt4, dtype: torch.dtype) -> Int4Weight | torch.Tensor:
    """Unpack the weight of one linear module, whose tensors `read` returns by name; dequantize unless `stored.stays`.

    Raises:
        CheckpointError: a group index is out of range.
    """
    weight = _unpacked(read, module, stored, dtype)
    if stored.stays:
        return weight
    order = read(f"{module}.{stored.order}")
    if not 0 <= int(order.min()) <= int(order.max()) < len(weight.scales):
        raise CheckpointError(f"{module}.{stored.order} names groups of which there are {len(weight.scales)}.")
    zeros, scales = (each.t().float().index_select(1, order) for each in (weight.zeros, weight.scales))
    return ((weight.levels.float() - zeros) * scales).to(dtype)


def _unpacked(read: Read, module: str, stored: StoredInt4, dtype: torch.dtype) -> Int4Weight:
    if stored.method == COMPRESSED:
        return _read_compressed(read, module, stored, dtype)
    packed, zeros, scales = (read(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
    if stored.method == "awq":
        levels, zeros = unpack(packed, AWQ_PLACES).t(), unpack(zeros, AWQ_PLACES)
    else:
        levels, zeros = unpack(packed.t(), IN_ORDER), unpack(zeros + stored.zero_offset * EACH_BY_ONE, IN_ORDER)
    return Int4Weight(levels=levels.contiguous(), scales=scales, zeros=zeros.to(torch.int32), dtype=dtype)


def _read_compressed(read: Read, module: str, stored: StoredInt4, dtype: torch.dtype) -> Int4Weight:
    scales = read(f"{module}.weight_scale").t().contiguous()
    if stored.has_zeros:
        zeros = unpack(read(f"{module}.weight_zero_point").t(), IN_ORDER).to(torch.int32)
    else:
        zeros = torch.full(scales.shape, MIDDLE, dtype=torch.int32, device=scales.device)
    return Int4Weight(levels=unpack(read(f"{module}.weight_packed"), IN_ORDER), scales=scales, zeros=zeros, dtype=dtype)


def stack_int4(parts: Sequence[Int4Weight]) -> Int4Weight:
    """Stack weights that read the same input along their output rows."""
    return Int4Weight(
        levels=torch.cat([part.levels for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat([part.zeros for part in parts], dim=1),
        dtype=parts[0].dtype,
    )


def unpack(packed: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Unpack int32 [rows, n] to uint8 [rows, 8 * n]; value i of each eight is at bit 4 * places[i]."""
    out = torch.empty(*packed.shape, len(places), dtype=torch.uint8, device=packed.device)
    for index, place in enumerate(places):
        out[..., index] = (packed >> 4 * place) & 15
    return out.flatten(-2)
