"""The GPU that kernels are launched on, as far as launch shapes depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

PROGRAMS_WANTED = 264
"""Target number of programs when splitting work: two per multiprocessor of the largest GPUs."""

_pretended: ContextVar[str | None] = ContextVar("pretended", default=None)


def current() -> str:
    """Return the architecture's compiler name, such as "sm_90" or "gfx942"; "sm_80" if there is no GPU."""
    return _pretended.get() or _present()


def fp8_dtype() -> torch.dtype | None:
    """Return the e4m3 dtype that the current GPU converts in hardware, or None if it has none."""
    name = current()
    if name.startswith("gfx"):
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(name)
    return torch.float8_e4m3fn if int(name.removeprefix("sm_")) >= 89 else None


def has_fp8_products() -> bool:
    """Return whether torch can multiply e4m3 matrices with per-row scales of both operands on the current GPU."""
    name = current()
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90


def shared_bytes() -> int:
    """Return the bytes of shared memory that all programs on one multiprocessor may use together.

    On NVIDIA GPUs this excludes the 1 KiB reserved for each program.
    """
    name = current()
    if name.startswith("gfx"):
        return 64 << 10
    return {"sm_80": 160, "sm_90": 224, "sm_100": 224, "sm_103": 224}.get(name, 96) << 10


def max_registers(num_warps: int, num_programs: int) -> int:
    """Return the registers of each thread if a multiprocessor of NVIDIA's has so many programs of so many warps."""
    return min(255, (1 << 16) // (32 * num_warps * num_programs))


def bounded(count: int | None) -> dict[str, int]:
    """Return the launch option for a bound on each thread's registers; none if it is None, or the GPU is not NVIDIA's.

    Without one, NVIDIA's assembler may spill a few, so that more programs would fit than a launch means to have.
    """
    return {"maxnreg": count} if count and current().startswith("sm_") else {}


def num_multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU; 2 if there is none and programs are interpreted."""
    return _counted() if torch.cuda.is_available() else 2


@contextmanager
def pretending(name: str) -> Iterator[None]:
    """Shape launches for another GPU than the one present."""
    token = _pretended.set(name)
    try:
        yield
    finally:
        _pretended.reset(token)


@cache
def _present() -> str:
    if not torch.cuda.is_available():
        return "sm_80"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@cache
def _counted() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)
