"""Which GPU kernels are launched on, where the shape of a launch depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

PROGRAMS_WANTED = 264
"""Work is cut until there are about this many programs: two for each multiprocessor of the largest GPUs."""

_pretended: ContextVar[str | None] = ContextVar("pretended", default=None)


def current() -> str:
    """Return the architecture as compilers name it: "sm_90", "gfx942"; "sm_80" where there is no GPU."""
    return _pretended.get() or _present()


def fp8_dtype() -> torch.dtype | None:
    """Return the e4m3 numbers that the current GPU converts by instructions of its own, None where it has none."""
    name = current()
    if name.startswith("gfx"):
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(name)
    return torch.float8_e4m3fn if int(name.removeprefix("sm_")) >= 89 else None


def has_fp8_products() -> bool:
    """Return whether the current GPU multiplies e4m3 matrices with a scale for each row of both (torch's library)."""
    name = current()
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90


def shared_bytes() -> int:
    """Return how much shared memory programs on one multiprocessor may take together.

    On NVIDIA's without the KiB that each of them costs.
    """
    name = current()
    if name.startswith("gfx"):
        return 64 << 10
    return {"sm_80": 160, "sm_90": 224, "sm_100": 224, "sm_103": 224}.get(name, 96) << 10


def num_multiprocessors() -> int:
    """Return how many multiprocessors the GPU has; 2 where there is none, and each program is interpreted."""
    return _counted() if torch.cuda.is_available() else 2


@contextmanager
def pretending(name: str) -> Iterator[None]:
    """Shape launches for a GPU that is not here."""
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
