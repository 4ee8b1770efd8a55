"""The GPU kernels: on a GPU where there is one, elsewhere on a simulated one, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICE = torch.device("cuda")
SHORT = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *SHORT]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the largest number: sums in another order, and in the short types rounded once or twice."""
FEW_LENGTHS = (1, 65)


def dtypes_and_lengths(*lengths: int) -> list[tuple[torch.dtype, int]]:
    """Return all lengths in float32, and a few in short types, whose rounding knows nothing of lengths."""
    return [
        *((torch.float32, length) for length in lengths),
        *((dtype, length) for dtype in SHORT for length in FEW_LENGTHS),
    ]


@pytest.fixture(autouse=True)
def on_a_gpu(a_gpu: None) -> None:
    """Run every test here on a GPU, if only a simulated one."""


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill memory that nobody has written with NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers near 1 on the device."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, at_least: float = 0.0) -> None:
    """Compare with a result in float64, by the type of what was found.

    Args:
        at_least: how large results are wherever their terms do not cancel out.
    """
    scale = max(at_least, float(expected.abs().max())) if expected.numel() else 1.0
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance * scale, rtol=tolerance)
