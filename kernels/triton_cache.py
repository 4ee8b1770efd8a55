"""Compiles recorded launches without the GPU, filling Triton's disk cache from several processes in parallel.

One process compiles one kernel at a time, a second or more each, and a server launches a hundred different ones.
Compilation goes through Triton's own launch path, so the cached result has the same key as a real launch.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from kernels.recording import ALIGNMENT, TYPE_BY_DTYPE, Launch, recording

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
"""Each one imports torch, which takes memory."""
Tell = Callable[[int, int], None]
"""Progress callback, called after each kernel with the number done and the total."""
DTYPE_BY_TYPE = {kind: dtype for dtype, kind in TYPE_BY_DTYPE.items()}


def compile_ahead(
    runs: Iterable[Callable[[], object]], num_processes: int, tell: Tell = lambda done, total: None
) -> None:
    """Compile the kernels that `runs` launch, in parallel, for the GPU present.

    The launches are only recorded, not executed. If worker processes cannot be started or die, the failure is logged
    and each kernel is compiled at its first launch.
    """
    with recording() as launches:
        for run in runs:
            run()
    started_s = time.monotonic()
    try:
        count = fill_cache(launches, triton.runtime.driver.active.get_current_target(), num_processes, tell)
    except (BrokenProcessPool, OSError):
        _logger.exception("kernels could not be compiled ahead of time; each is compiled at its first launch")
        return
    _logger.info("compiled %d of %d kernels in %.1f s", count, len(launches), time.monotonic() - started_s)


def fill_cache(
    launches: Sequence[Launch], target: GPUTarget, num_processes: int, tell: Tell = lambda done, total: None
) -> int:
    """Compile those launches that are not cached yet, in worker processes; return how many there were.

    A kernel that does not compile is logged, and fails again when it is launched.

    Raises:
        BrokenProcessPool: a process was killed, e.g. for its memory. What was compiled until then is kept.
    """
    folder, common = Path(triton.knobs.cache.dir), _common(target)
    missing = [(launch, stamp) for launch in launches if not (stamp := folder / _name(launch, common)).exists()]
    if not missing:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    # Spawned, because torch's threads do not survive a fork. At least two kernels per process, because starting one
    # takes as long as compiling a kernel.
    count = min(num_processes, MAX_PROCESSES, -(-len(missing) // 2))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        begun = [(pair, pool.submit(_fill, pair[0], target)) for pair in missing]
        for number, ((launch, stamp), done) in enumerate(begun, start=1):
            error = done.exception()
            if isinstance(error, BrokenProcessPool):
                # Not this kernel's failure: none of the rest is compiled.
                raise error
            tell(number, len(missing))
            if error is None:
                stamp.touch()
            else:
                _logger.error("%s does not compile: %s", launch.title, error)
    return len(missing)


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Do everything that a launch on this target does before it needs the GPU. For processes without a GPU.

    Raises:
        Exception: whatever Triton raises for a kernel that does not compile.
    """
    triton.runtime.driver.set_active(_NoGpu(target))
    kernel = getattr(import_module(launch.module), launch.kernel)
    return kernel.warmup(*_arguments(launch), grid=(1,), **dict(launch.options))


def _fill(launch: Launch, target: GPUTarget) -> None:
    kernel = compile_launch(launch, target)
    if target.backend == "cuda" and torch.cuda.is_available():
        # Builds of Triton for other devices may lack it.
        from triton.backends.nvidia import driver

        # Triton 3.6 launches each signature by a C function of its own, which it compiles at the first launch.
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def _common(target: GPUTarget) -> bytes:
    """Return what every compiled kernel depends on: Triton's version, the target and the sources."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("**/*.py")))
    return b"\0".join([triton.__version__.encode(), repr(target).encode(), *sources])


def _name(launch: Launch, common: bytes) -> str:
    """Return the name of the stamp file that marks a launch as compiled; it lies in the cache it vouches for."""
    return f"antiphon-{hashlib.sha256(common + repr(launch).encode()).hexdigest()[:24]}"


class _NoGpu:
    """The part of a Triton driver that is used before a launch."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Kernels key their compiled variants by device number.
        return hash(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0


class _Address:
    """The part of a tensor that Triton uses before a launch."""

    def __init__(self, dtype: torch.dtype, *, is_aligned: bool) -> None:
        self.dtype = dtype
        self._address = ALIGNMENT if is_aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _arguments(launch: Launch) -> list[object]:
    """Return arguments that Triton specializes exactly as it did those of the launch."""
    constants = dict(launch.constants)
    arguments: list[object] = []
    for name, kind in launch.signature:
        is_aligned = name in launch.aligned
        if kind == "constexpr":
            arguments.append(constants[name])
        elif kind.startswith("*"):
            arguments.append(_Address(DTYPE_BY_TYPE[kind], is_aligned=is_aligned))
        elif kind == "fp32":
            arguments.append(0.5)
        else:
            arguments.append((ALIGNMENT if kind == "i32" else 1 << 40) + (not is_aligned))
    return arguments
