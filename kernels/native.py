"""Loads the CPU kernels written in C++, which `kernels.compiling` compiles into a cache folder.

They are plain functions over addresses and sizes, called through ctypes: without torch's headers they compile in 15 to
20 s. If there is no compiler, or it fails, `load` returns None and torch's operators do the work.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kernels.compiling import build, cache_folder

_logger = logging.getLogger(__name__)

SUFFIX_BY_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeKernels:
    """One compiled library: the kernels by name and dtype, and the entry points of the thread pool that runs them."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        """Unique to the combination of sources, compiler, flags and processor."""
        self._library = ctypes.CDLL(str(path))
        self._address_by_kernel: dict[tuple[str, torch.dtype], int] = {}
        create, run, destroy = self._library.pool_create, self._library.pool_run, self._library.pool_destroy
        create.argtypes, create.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_void_p
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p), ctypes.c_int64
        destroy.argtypes, destroy.restype = (ctypes.c_void_p,), None
        run_here = self._library.op_run
        run_here.argtypes, run_here.restype = (ctypes.c_void_p,), None
        self.run_here: Callable[[int], None] = run_here
        """Run the op at an address on the calling thread alone, concurrently with any pool."""
        self.create_pool: Callable[[int, int], int] = create
        self.run_pool: Callable[[int, object, int, object], int] = run
        self.destroy_pool: Callable[[int], None] = destroy

    def address(self, name: str, dtype: torch.dtype) -> int:
        """Return the address of a kernel for a tensor dtype, as `kernels.program.Op` takes it."""
        found = self._address_by_kernel.get((name, dtype))
        if found is None:
            function = getattr(self._library, f"{name}_{SUFFIX_BY_DTYPE[dtype]}")
            found = ctypes.cast(function, ctypes.c_void_p).value
            assert found is not None
            self._address_by_kernel[name, dtype] = found
        return found


@cache
def load() -> NativeKernels | None:
    """Return the kernels, compiling them if they are not cached; log one line and return None if that fails."""
    try:
        return NativeKernels(build(cache_folder()))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        _logger.warning("cannot compile the CPU kernels; torch operators are used instead: %s", error)
        return None
