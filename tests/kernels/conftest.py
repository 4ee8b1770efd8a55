"""A pool of threads to run the CPU kernels, and what several of their tests need."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import pytest
import torch

from kernels import compiling
from kernels.native import NativeKernels
from kernels.program import Pool

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative to the largest number: float32 in another order, bfloat16 rounded once or twice at 8 bits."""


@pytest.fixture(scope="session")
def pool(kernels: NativeKernels) -> Pool:
    """Three threads: more than a small machine has, so that they take turns."""
    return Pool(kernels, 3)


@pytest.fixture
def compiler() -> str:
    """A C++ compiler of this machine."""
    found = next((path for name in compiling.COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no C++ compiler here")
    return found


def resident_bytes() -> int:
    """Return what memory this process holds."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the kernel tells no resident size here")
    return int(statm.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def assert_near(found: torch.Tensor, expected: torch.Tensor, at_least: float = 0.0) -> None:
    """Compare with a result in higher precision.

    Args:
        at_least: how large results are wherever their terms do not cancel out.
    """
    scale = max(at_least, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.double(), expected.double(), atol=TOLERANCE[found.dtype] * scale, rtol=TOLERANCE[found.dtype]
    )
