"""Triton's interpreter on the simulated GPU: every address that a kernel reads or writes is looked up.

A kernel may only touch memory of the device that is still allocated, and only in order: what another stream has
written, or still uses, must have been waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from triton.runtime import interpreter

from kernels import overlap
from tests.simulated_gpu.order import GRAIN, Block
from tests.simulated_gpu.tensors import Access, Gpu, SimulatedTensor

# As they are before anything takes their place: a test may ask for a device twice.
_CALL, _MEMORY = interpreter.GridExecutor.__call__, interpreter._interpreter
_SET_DIM, _SET_INDEX = interpreter.interpreter_builder.set_grid_dim, interpreter.interpreter_builder.set_grid_idx


class Touched:
    """What a launch has read and written."""

    def __init__(self) -> None:
        self._grains: dict[tuple[int, bool], tuple[Block, NDArray[np.bool_]]] = {}

    def add(self, block: Block, places: NDArray[np.int64], size: int, *, is_write: bool) -> None:
        """Note elements of `size` bytes, by their byte offsets in a block."""
        key = block.start, is_write
        if key not in self._grains:
            self._grains[key] = block, np.zeros(block.num_grains, dtype=np.bool_)
        for at in range(0, size, GRAIN):
            self._grains[key][1][(places + at) // GRAIN] = True

    def accesses(self) -> list[Access]:
        """Return all of it."""
        return [
            Access(block, np.flatnonzero(is_touched), is_write)
            for (_, is_write), (block, is_touched) in self._grains.items()
        ]


class Watched:
    """Stands for the interpreter's access to memory."""

    def __init__(self, gpu: Gpu, memory: Any) -> None:
        self._gpu = gpu
        self._memory = memory
        self.touched: Touched | None = None
        self.programs = gpu.programs
        self.name, self.overlaps = "", False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Read where `mask` is set."""
        self._note(addresses[mask.astype(bool)], np.dtype(dtype).itemsize, is_write=False)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        """Write where `mask` is set."""
        self._note(addresses[mask.astype(bool)], values.dtype.itemsize, is_write=True)
        return self._memory.store(addresses, values, mask)

    def atomic_rmw(self, op: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
        """Read and write where `mask` is set."""
        asked = addresses[mask.astype(bool)]
        self._note(asked, values.dtype.itemsize, is_write=True, is_atomic=True)
        self._meet(asked, order)
        return self._memory.atomic_rmw(op, addresses, values, mask, order)

    def atomic_cas(self, addresses: Any, expected: Any, values: Any, order: Any) -> Any:
        """Read and write."""
        self._note(np.atleast_1d(addresses), values.dtype.itemsize, is_write=True, is_atomic=True)
        self._meet(np.atleast_1d(addresses), order)
        return self._memory.atomic_cas(addresses, expected, values, order)

    def _meet(self, addresses: NDArray[Any], order: Any) -> None:
        """Have the program meet those that were at these addresses before it, if the atomic orders anything."""
        if order.name != "RELAXED":
            for address in addresses.reshape(-1):
                self.programs.meet(int(address))

    def _note(self, addresses: NDArray[Any], size: int, *, is_write: bool, is_atomic: bool = False) -> None:
        if self.touched is None:
            return
        left = addresses.astype(np.int64).reshape(-1)
        while left.size:
            block = self._gpu.blocks.at(int(left[0]))
            if block is None or block.stream is None:
                where = "is not allocated" if block is None else "lies on the host"
                raise AssertionError(
                    f"a kernel {'writes' if is_write else 'reads'} address {int(left[0])}, which {where}"
                )
            is_inside = (left >= block.start) & (left + size <= block.end)
            if not is_inside[0]:
                raise AssertionError("a kernel reads past the end of memory")
            places = left[is_inside] - block.start
            self.touched.add(block, places, size, is_write=is_write)
            if not is_atomic:
                self.programs.access(block, places, size, is_write=is_write)
            left = left[~is_inside]


class Launch:
    """A launch of a kernel, which can be made again."""

    def __init__(self, gpu: Gpu, watched: Watched, executor: Any, args: Any, kwargs: Any) -> None:
        self._gpu, self._watched = gpu, watched
        self._executor, self._args, self._kwargs = executor, args, kwargs

    def __call__(self) -> None:
        """Run the kernel and note what it has accessed."""
        with self._gpu.order.lock:
            touched = self._watched.touched = Touched()
            self._watched.name = self._executor.fn.__name__
            self._watched.overlaps = bool(self._kwargs.get("OVERLAPS"))
            try:
                _CALL(self._executor, *self._args, **self._kwargs)
            finally:
                self._watched.touched = None
            self._gpu.programs.end()
            self._gpu.note(touched.accesses())


def watch_launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels run on the simulated GPU."""
    watched = Watched(gpu, _MEMORY)
    monkeypatch.setattr(interpreter, "_interpreter", watched)
    builder = interpreter.interpreter_builder
    dims: list[int] = []

    def set_grid_dim(*grid: int) -> None:
        dims[:] = grid
        watched.programs.launch(watched.name, grid, overlaps=watched.overlaps)
        _SET_DIM(*grid)

    def set_grid_idx(*index: int) -> None:
        watched.programs.run(int(np.ravel_multi_index(index, dims)))
        _SET_INDEX(*index)

    monkeypatch.setattr(overlap, "gdc_wait", gpu.programs.wait)
    monkeypatch.setattr(overlap, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not (isinstance(leaf, SimulatedTensor) and not leaf.is_on_host):
                raise AssertionError(f"{executor.fn.__name__} is given a tensor of the host")
        plain = pytree.tree_map(lambda leaf: leaf.elem if isinstance(leaf, SimulatedTensor) else leaf, (args, kwargs))
        made = Launch(gpu, watched, executor, *plain)
        if gpu.recording is None:
            made()
        else:
            gpu.recording.operations.append((gpu.order.current, made))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
