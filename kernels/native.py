"""The CPU kernels in C++, compiled by `kernels.compiling` and kept in a cache folder.

Plain functions over addresses and sizes, known to Python through ctypes: without torch's headers they compile in some
seconds. Where there is no compiler, or it fails, `load` returns None and torch's operators do the work.
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
    """One compiled library: the kernels by name and dtype, and the pool of threads that runs them."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        """Tells sources, compiler and processor apart."""
        self._library = ctypes.CDLL(str(path))
        create, run, destroy = self._library.pool_create, self._library.pool_run, self._library.pool_destroy
        create.argtypes, create.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_void_p
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p), ctypes.c_int64
        destroy.argtypes, destroy.restype = (ctypes.c_void_p,), None
        run_here = self._library.op_run
        run_here.argtypes, run_here.restype = (ctypes.c_void_p,), None
        self.run_here: Callable[[int], None] = run_here
        """Run the op at an address on the calling thread alone, beside whatever a pool runs."""
        self.create_pool: Callable[[int, int], int] = create
        self.run_pool: Callable[[int, object, int, object], int] = run
        self.destroy_pool: Callable[[int], None] = destroy

    def address(self, name: str, dtype: torch.dtype) -> int:
        """Return where a kernel for tensors of a dtype lies, as `kernels.program.Op` wants it."""
        function = getattr(self._library, f"{name}_{SUFFIX_BY_DTYPE[dtype]}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address


@cache
def load() -> NativeKernels | None:
    """Return the kernels, compiled now or earlier; None, and one line in the log, where that cannot be done."""
    try:
        return NativeKernels(build(cache_folder()))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        _logger.warning("the CPU kernels cannot be compiled, and torch's operators do their work: %s", error)
        return None
