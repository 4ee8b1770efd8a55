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
        ("number", ctypes.c_double * 2),
        ("begins_beside", ctypes.c_int64),
        ("may_pause", ctypes.c_int64),
    ]


class PauseWish:
    """Whether somebody wants a program to pause; any thread."""

    def __init__(self) -> None:
        self.number = ctypes.c_int64()

    def set(self) -> None:
        """Have the run under way, or else the next one, end where it may pause."""
        self.number.value = 1

    def clear(self) -> None:
        """Take it back."""
        self.number.value = 0


class Pool:
    """Threads that run ops together, the calling one among them. One call at a time.

    Args:
        niceness: by how much its own threads stand back behind others of the machine; the calling one is as it is.
    """

    def __init__(self, kernels: NativeKernels, num_threads: int, niceness: int = 0) -> None:
        self.num_threads = num_threads
        self._kernels = kernels
        self._handle = kernels.create_pool(num_threads, niceness)
        finalizer = weakref.finalize(self, kernels.destroy_pool, self._handle)
        # As the process ends an engine's thread may be in a step, and goes on until there is no process.
        finalizer.atexit = False

    def op(
        self,
        name: str,
        dtype: torch.dtype,
        count: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> Op:
        """Write down a call; the caller keeps the tensors alive.

        Args:
            name: of a kernel, as its C++ exports it.
            count: int64, its first element read at every run: how many rows there are.
            tensors, sizes, numbers: as the kernel's comment says; all tensors contiguous, of a cache each block.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        op = Op(kernel=self._kernels.address(name, dtype), count=count.data_ptr())
        op.at[: len(addresses)] = addresses
        op.size[: len(sizes)] = sizes
        op.number[: len(numbers)] = numbers
        return op

    def run(self, ops: ctypes.Array[Op], wish: PauseWish, start: int = 0) -> int:
        """Run ops in their order from one on, each by all threads. Frees the interpreter.

        Returns the first that was not run: `len(ops)`, unless a pause was wished for and one of them permits it.
        """
        first = ctypes.byref(ops, start * ctypes.sizeof(Op))
        return start + self._kernels.run_pool(self._handle, first, len(ops) - start, ctypes.byref(wish.number))

    def call(
        self,
        name: str,
        dtype: torch.dtype,
        count: int,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        """Run one kernel now."""
        counted = torch.tensor([count])
        self.run((Op * 1)(self.op(name, dtype, counted, tensors, sizes, numbers)), PauseWish())

    def call_here(
        self, name: str, dtype: torch.dtype, count: int, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> None:
        """Run one kernel now on the calling thread alone, beside whatever others run."""
        counted = torch.tensor([count])
        op = self.op(name, dtype, counted, tensors, sizes)
        self._kernels.run_here(ctypes.addressof(op))


class Program:
    """A list of ops that grows until it is first run.

    Attributes:
        wish: whether it should pause.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.wish = PauseWish()
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
        numbers: Sequence[float] = (),
        *,
        begins_beside: bool = False,
        may_pause: bool = False,
    ) -> None:
        """Append a call, as `Pool.op` describes it, and keep its tensors.

        Args:
            begins_beside: it may run beside the call before: neither writes what the other reads or writes.
            may_pause: a run may end before it, and another go on from here.
        """
        op = self._pool.op(name, dtype, count, tensors, sizes, numbers)
        op.begins_beside, op.may_pause = begins_beside, may_pause
        self._ops.append(op)
        self._kept.extend(tensor for tensor in (count, *tensors) if tensor is not None)

    def __len__(self) -> int:
        return len(self._ops)

    def run(self, start: int = 0) -> int:
        """Run the ops from one on; returns the first that was not run, as `Pool.run` does."""
        if self._compiled is None:
            self._compiled = (Op * len(self._ops))(*self._ops)
        return self._pool.run(self._compiled, self.wish, start)
