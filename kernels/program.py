"""Kernels written down once and run again at every step, without Python between them.

A `Program` is to the CPU what a captured graph is to a GPU: the same ops over the same memory; only the numbers in that
memory, among them how many rows there are, differ from step to step.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from kernels.native import NativeKernels


class Op(ctypes.Structure):
    """`struct Op` of native.h."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("at", ctypes.c_void_p * 10),
        ("size", ctypes.c_int64 * 8),
        ("number", ctypes.c_double),
        ("begins_beside", ctypes.c_int64),
    ]


class Pool:
    """Threads that run ops together, the calling one among them. One call at a time."""

    def __init__(self, kernels: NativeKernels, num_threads: int) -> None:
        self._kernels = kernels
        self._handle = kernels.create_pool(num_threads)
        self._finalizer = weakref.finalize(self, kernels.destroy_pool, self._handle)

    def op(
        self,
        name: str,
        dtype: torch.dtype,
        count: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        number: float = 0.0,
    ) -> Op:
        """Write down a call; the caller keeps the tensors alive.

        Args:
            name: of a kernel, as its C++ exports it.
            count: int64, its first element read at every run: how many rows there are.
            tensors, sizes, number: as the kernel's comment says; all tensors contiguous, of a cache each block.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        op = Op(kernel=self._kernels.address(name, dtype), count=count.data_ptr(), number=number)
        op.at[: len(addresses)] = addresses
        op.size[: len(sizes)] = sizes
        return op

    def run(self, ops: ctypes.Array[Op]) -> None:
        """Run ops in their order, each by all threads; returns when the last is done. Frees the interpreter."""
        self._kernels.run_pool(self._handle, ops, len(ops))

    def call(
        self,
        name: str,
        dtype: torch.dtype,
        count: int,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        number: float = 0.0,
    ) -> None:
        """Run one kernel now."""
        counted = torch.tensor([count])
        self.run((Op * 1)(self.op(name, dtype, counted, tensors, sizes, number)))


class Program:
    """A list of ops that grows until it is first run."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ops: list[Op] = []
        self._kept: list[torch.Tensor] = []
        self._compiled: ctypes.Array[Op] | None = None

    def add(
        self,
        name: str,
        dtype: torch.dtype,
        count: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        number: float = 0.0,
        *,
        begins_beside: bool = False,
    ) -> None:
        """Append a call, as `Pool.op` describes it, and keep its tensors.

        Args:
            begins_beside: it may run beside the call before: neither writes what the other reads or writes.
        """
        op = self._pool.op(name, dtype, count, tensors, sizes, number)
        op.begins_beside = begins_beside
        self._ops.append(op)
        self._kept.extend(tensor for tensor in (count, *tensors) if tensor is not None)

    def run(self) -> None:
        """Run all ops."""
        if self._compiled is None:
            self._compiled = (Op * len(self._ops))(*self._ops)
        self._pool.run(self._compiled)
