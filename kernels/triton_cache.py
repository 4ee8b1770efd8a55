"""Compiles launches that were recorded, without the GPU, and fills Triton's cache on disk with many side by side.

One process compiles one kernel after the other, a second or more each, and a server launches a hundred different ones.
A launch is compiled by Triton's own way up to the launch, so that what is kept is found by the same key.
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
"""Each imports torch."""
Tell = Callable[[int, int], None]
"""Is told after each kernel how many are done, and of how many."""
DTYPE_BY_TYPE = {kind: dtype for dtype, kind in TYPE_BY_DTYPE.items()}


def compile_ahead(
    runs: Iterable[Callable[[], object]], num_processes: int, tell: Tell = lambda done, total: None
) -> None:
    """Compile for the GPU that is here what `runs` launch, many kernels side by side; nothing is computed meanwhile.

    Where processes cannot be had the log says so: each kernel is compiled as it is launched.
    """
    with recording() as launches:
        for run in runs:
            run()
    started_s = time.monotonic()
    try:
        count = fill_cache(launches, triton.runtime.driver.active.get_current_target(), num_processes, tell)
    except (BrokenProcessPool, OSError):
        _logger.exception("kernels could not be compiled ahead; each will be as it is launched")
        return
    _logger.info("compiled %d of %d kernels in %.1f s", count, len(launches), time.monotonic() - started_s)


def fill_cache(
    launches: Sequence[Launch], target: GPUTarget, num_processes: int, tell: Tell = lambda done, total: None
) -> int:
    """Compile launches for a GPU in processes of their own, those that have not been; return how many there were.

    What does not compile is told in the log, and will say so itself when it is launched.
    """
    folder, common = Path(triton.knobs.cache.dir), _common(target)
    missing = [(launch, stamp) for launch in launches if not (stamp := folder / _name(launch, common)).exists()]
    if not missing:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    # Not forked: torch's threads do not come along. No more of them than have two each: to begin takes as long as one.
    count = min(num_processes, MAX_PROCESSES, -(-len(missing) // 2))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        begun = [(pair, pool.submit(_fill, pair[0], target)) for pair in missing]
        for number, ((launch, stamp), done) in enumerate(begun, start=1):
            error = done.exception()
            tell(number, len(missing))
            if error is None:
                stamp.touch()
            else:
                _logger.error("%s does not compile: %s", launch.title, error)
    return len(missing)


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Do all that a launch on a GPU of this kind does before it needs the GPU; for processes that have none.

    Raises:
        Exception: whatever Triton says of a kernel that does not compile.
    """
    triton.runtime.driver.set_active(_NoGpu(target))
    kernel = getattr(import_module(launch.module), launch.kernel)
    return kernel.warmup(*_arguments(launch), grid=(1,), **dict(launch.options))


def _fill(launch: Launch, target: GPUTarget) -> None:
    compile_launch(launch, target)


def _common(target: GPUTarget) -> bytes:
    """Return what all that is compiled depends on."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("**/*.py")))
    return b"\0".join([triton.__version__.encode(), repr(target).encode(), *sources])


def _name(launch: Launch, common: bytes) -> str:
    """Return the file that says that a launch has been compiled; it lies beside what was, and goes with it."""
    return f"antiphon-{hashlib.sha256(common + repr(launch).encode()).hexdigest()[:24]}"


class _NoGpu:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Kernels remember by this number what was compiled.
        return hash(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0


class _Address:
    """What Triton asks of a tensor before it launches."""

    def __init__(self, dtype: torch.dtype, *, is_aligned: bool) -> None:
        self.dtype = dtype
        self._address = ALIGNMENT if is_aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _arguments(launch: Launch) -> list[object]:
    """Return arguments that Triton tells apart as it did those of the launch."""
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
