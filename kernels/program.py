"""Records a sequence of kernel calls once and replays it every step, with no Python in between.

A `Program` is to the CPU what a CUDA graph is to a GPU: the same ops over the same memory. Only the contents of that
memory, including the number of rows, change from step to step.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence

import torch

from kernels.native import NativeKernels


class Op(ctypes.Structure):
    """Mirrors `struct Op` of native.h."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("at", ctypes.c_void_p * 10),
        ("size", ctypes.c_int64 * 8),
        ("number", ctypes.c_double * 2),
        ("begins_beside", ctypes.c_int64),
        ("may_pause", ctypes.c_int64),
    ]


_PACKED_OP = struct.Struct("@QQ10Q8q2dqq")
"""The fields of `Op`. Packing them takes a third of the time of setting them one by one."""
_ADDRESSES, _SIZES, _NUMBERS = (0,) * 10, (0,) * 8, (0.0,) * 2


class PauseFlag:
    """A number that a running program looks at: whether it is to pause. Thread-safe."""

    def __init__(self) -> None:
        self.number = ctypes.c_int64()

    def set(self) -> None:
        """Make the current run, or else the next one, stop at the next op that permits a pause."""
        self.number.value = 1

    def clear(self) -> None:
        """Withdraw the request."""
        self.number.value = 0

    def is_set(self) -> bool:
        """Tell whether a pause is requested."""
        return self.number.value != 0


class Pool:
    """A thread pool that runs each op on all its threads, including the calling one. Only one call at a time.

    Args:
        niceness: added to the niceness of the pool's own threads; the calling thread keeps its priority.
    """

    def __init__(self, kernels: NativeKernels, num_threads: int, niceness: int = 0) -> None:
        self.num_threads = num_threads
        self.kernels = kernels
        self._handle = kernels.create_pool(num_threads, niceness)
        finalizer = weakref.finalize(self, kernels.destroy_pool, self._handle)
        # At process exit an engine's thread may still be in a step: the pool must outlive it.
        finalizer.atexit = False
        # Those of `call`, which are overwritten by the next one.
        self._op, self._count, self._never = Op(), ctypes.c_int64(), ctypes.c_int64()
        self._count_address = ctypes.addressof(self._count)

    def op(
        self,
        name: str,
        dtype: torch.dtype,
        count: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> Op:
        """Record a call. The caller keeps the tensors alive.

        Args:
            name: the kernel's name as exported from C++, without the dtype suffix.
            count: int64; its first element, the number of rows, is read at every run.
            tensors, sizes, numbers: as documented at the kernel. Tensors are contiguous; of a cache, each block is.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        op = Op(kernel=self.kernels.address(name, dtype), count=count.data_ptr())
        op.at[: len(addresses)] = addresses
        op.size[: len(sizes)] = sizes
        op.number[: len(numbers)] = numbers
        return op

    def run(self, ops: ctypes.Array[Op], flag: PauseFlag, start: int = 0) -> int:
        """Run ops in order from `start` on, each on all threads. Releases the GIL.

        Returns the index of the first op not run: `len(ops)`, unless a pause was requested and an op permits it.
        """
        first = ctypes.byref(ops, start * ctypes.sizeof(Op))
        return start + self.kernels.run_pool(self._handle, first, len(ops) - start, ctypes.byref(flag.number))

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
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._count.value = count
        _PACKED_OP.pack_into(
            self._op,
            0,
            self.kernels.address(name, dtype),
            self._count_address,
            *addresses,
            *_ADDRESSES[len(addresses) :],
            *sizes,
            *_SIZES[len(sizes) :],
            *numbers,
            *_NUMBERS[len(numbers) :],
            0,
            0,
        )
        self.kernels.run_pool(self._handle, ctypes.byref(self._op), 1, ctypes.byref(self._never))

    def call_here(
        self, name: str, dtype: torch.dtype, count: int, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> None:
        """Run one kernel now on the calling thread alone, concurrently with the pool."""
        counted = torch.tensor([count])
        op = self.op(name, dtype, counted, tensors, sizes)
        self.kernels.run_here(ctypes.addressof(op))


class Program:
    """A list of ops, which may be appended to until it is first run.

    Attributes:
        pause_flag: set to make a run pause.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.pause_flag = PauseFlag()
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
        """Append a call, with arguments as in `Pool.op`, and keep its tensors alive.

        Args:
            begins_beside: it may run concurrently with the previous call: neither writes what the other reads or
                writes.
            may_pause: a run may stop before this call, and a later run resume here.
        """
        op = self._pool.op(name, dtype, count, tensors, sizes, numbers)
        op.begins_beside, op.may_pause = begins_beside, may_pause
        self._ops.append(op)
        self._kept.extend(tensor for tensor in (count, *tensors) if tensor is not None)

    def __len__(self) -> int:
        return len(self._ops)

    def run(self, start: int = 0) -> int:
        """Run the ops from `start` on; return the index of the first op not run, as `Pool.run` does."""
        if self._compiled is None:
            self._compiled = (Op * len(self._ops))(*self._ops)
        return self._pool.run(self._compiled, self.pause_flag, start)
