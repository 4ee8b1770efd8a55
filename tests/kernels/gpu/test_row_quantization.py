"""Rows of one byte a number, rounded as the definition rounds them."""

from __future__ import annotations

import pytest
import torch

from kernels.row_quantization.launch import quantize_rows
from kernels.row_quantization.reference import quantize_rows as by_definition
from tests.kernels.gpu.conftest import DEVICE

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("width", [16, 100])
def test_rows_are_rounded_as_defined(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(5, width, device=DEVICE) * torch.logspace(-4, 4, 5, device=DEVICE).unsqueeze(1)
    x[3], x[4] = 0.0, 1e-38
    held, spans = quantize_rows(x, dtype)
    expected, expected_spans = by_definition(x, dtype)
    assert torch.equal(spans, expected_spans)
    # A GPU multiplies and adds at once, so that an integer next to a half may be the other one.
    slack = int(dtype is torch.int8 and torch.cuda.is_available())
    torch.testing.assert_close(held.float(), expected.float(), rtol=0, atol=slack)


def test_halves_are_halves() -> None:
    """Short numbers often lie halfway between two steps: a factor that is off by its last bit decides for one side.

    Not so of whole numbers, whose product and sum a GPU rounds at once.
    """
    x = torch.randn(100, 96, device=DEVICE).bfloat16().float()
    held, _ = quantize_rows(x, FP8)
    assert torch.equal(held.float(), by_definition(x, FP8)[0].float())
