"""Arguments without data for launches that are only recorded (`kernels.recording`)."""

from __future__ import annotations

import torch

from kernels.mxfp4.reference import BLOCK as MXFP4_BLOCK
from kernels.mxfp4.reference import Mxfp4Matrix
from kernels.streamed_linear.layout import GROUP
from kernels.streamed_linear.reference import FP8, Fp8Matrix, Int4Matrix


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def int4_matrix(width: int, depth: int, dtype: torch.dtype, group: int = GROUP) -> Int4Matrix:
    """Return 4-bit weights [width, depth] without data."""
    units = empty(depth // group, width, dtype=torch.int32)
    return Int4Matrix(empty(width, depth // 8, dtype=torch.int32), units, dtype)


def mxfp4_matrix(width: int, depth: int, dtype: torch.dtype) -> Mxfp4Matrix:
    """Return MXFP4 weights [width, depth] without data."""
    units = empty(width, -(-depth // MXFP4_BLOCK), dtype=torch.int32)
    return Mxfp4Matrix(empty(width, depth // 8, dtype=torch.int32), units, dtype)


def fp8_matrix(width: int, depth: int) -> Fp8Matrix:
    """Return 8-bit float weights [width, depth] without data."""
    return Fp8Matrix(empty(width, depth, dtype=FP8), empty(width, dtype=torch.float32))


def whole(*shape: int) -> torch.Tensor:
    """Return int64 numbers without data."""
    return empty(*shape, dtype=torch.int64)
