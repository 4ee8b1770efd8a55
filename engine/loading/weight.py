"""A weight as stored in a checkpoint: dense, or quantized with scales. A device dequantizes what it cannot use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.decoder.stored import Stored
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.decoder.stored_numbers import StoredBnb4, StoredInt8, StoredNvfp4
from engine.loading import fp8, int4
from engine.loading.fp8 import Fp8Weight
from engine.loading.int4 import Int4Weight
from engine.loading.mxfp4 import Mxfp4Weight, read_mxfp4
from engine.loading.numbers import Read, read_bnb4, read_int8, read_nvfp4

Weight = torch.Tensor | Int4Weight | Fp8Weight | Mxfp4Weight


def dense(weight: Weight) -> torch.Tensor:
    """Return a weight as a dense tensor, dequantized if need be."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense()


def read_stored(read: Read, module: str, stored: Stored, dtype: torch.dtype) -> Weight:
    """Return the weight of one linear module, or of several experts; `read` returns its tensors by name."""
    match stored:
        case StoredInt4():
            return int4.read_int4(read, module, stored, dtype)
        case StoredMxfp4():
            return read_mxfp4(read, module, dtype)
        case StoredFp8():
            return fp8.read_fp8(read, module, stored, dtype)
        case StoredInt8():
            return read_int8(read, module, stored, dtype)
        case StoredBnb4():
            return read_bnb4(read, module, stored, dtype)
        case StoredNvfp4():
            return read_nvfp4(read, module, stored, dtype)


def stack(parts: Sequence[Weight]) -> Weight:
    """Stack weights that read the same input along their output rows; dequantize unless all are INT4 or all FP8."""
    if len(parts) == 1:
        return parts[0]
    levels = [part for part in parts if isinstance(part, Int4Weight)]
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(levels) == len(parts):
        return int4.stack_int4(levels)
    if len(floats) == len(parts):
        return fp8.stack_fp8(floats)
    return torch.cat([dense(part) for part in parts])


def split(weight: Weight, count: int) -> Iterator[Weight]:
    """Yield the `count` weights stacked along output rows or, in a dense tensor, as [count, out, in]."""
    if isinstance(weight, torch.Tensor):
        yield from weight.view(count, -1, weight.shape[-1])
        return
    rows = weight.shape[0] // count
    for start in range(0, weight.shape[0], rows):
        yield weight.rows(start, start + rows)
