"""Packs an adapter's matrices with the CPU kernel, on the calling thread, concurrently with the engine's step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora_pack.reference import Form, packed_numel
from kernels.native import NativeKernels
from kernels.program import Op

_DTYPE_NUMBER = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Matrix(ctypes.Structure):
    """Mirrors `struct Matrix` of cpu.cpp."""

    _fields_ = [
        ("from", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("form", ctypes.c_int64),
        ("gain", ctypes.c_void_p),
        ("to", ctypes.c_int64),
        ("factor", ctypes.c_double),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One matrix and its layout; fields as the arguments of the reference's `lora_pack`."""

    matrix: torch.Tensor
    form: Form
    factor: float = 1.0
    gain: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """All packed matrices in `flat`, and the address of each."""

    flat: torch.Tensor
    addresses: list[int]


def lora_pack(packings: Sequence[Packing], dtype: torch.dtype, kernels: NativeKernels) -> Packed:
    """Pack matrices contiguously, without using the thread pool."""
    table, offsets, end = (Matrix * len(packings))(), list[int](), 0
    for place, item in enumerate(packings):
        matrix, gain = item.matrix, item.gain
        assert matrix.is_contiguous(), "a matrix is not as a file has it"
        offsets.append(end)
        table[place] = Matrix(
            matrix.data_ptr(), _DTYPE_NUMBER[matrix.dtype], *matrix.shape, item.form,
            None if gain is None else gain.data_ptr(), end, item.factor,
        )  # fmt: skip
        end += packed_numel(matrix.shape, item.form, dtype)
    flat = torch.empty(end, dtype=dtype)
    count, first = ctypes.c_int64(len(packings)), flat.data_ptr()
    op = Op(kernel=kernels.address("lora_pack", dtype), count=ctypes.addressof(count))
    op.at[:2] = ctypes.addressof(table), first
    kernels.run_here(ctypes.addressof(op))
    return Packed(flat=flat, addresses=[first + offset * dtype.itemsize for offset in offsets])
