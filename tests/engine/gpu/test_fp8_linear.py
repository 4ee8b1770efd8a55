from __future__ import annotations

import pytest
import torch

from engine.gpu.fp8_linear import Fp8Linear
from kernels.row_quantization.launch import quantize_rows
from kernels.row_quantization.reference import quantize_rows as by_definition
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.rounding import _rounds_right  # noqa: F401 - a fixture

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("width", [16, 100])
def test_rows_are_rounded_as_defined(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(5, width, device=DEVICE) * torch.logspace(-4, 4, 5, device=DEVICE).unsqueeze(1)
    x[3], x[4] = 0.0, 1e-38
    held, spans = quantize_rows(x, dtype)
    expected, expected_spans = by_definition(x, dtype)
    assert torch.equal(spans, expected_spans)
    assert torch.equal(held.float(), expected.float())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_that_of_the_numbers_meant(has_bias: bool) -> None:
    weight, x = torch.randn(48, 96, device=DEVICE), torch.randn(7, 96, device=DEVICE)
    # Every row has its own scale, so that these do not drown the others.
    weight[5] *= 1000
    x[2] *= 1000
    bias = torch.randn(48, device=DEVICE).bfloat16() if has_bias else None
    found = Fp8Linear(weight.bfloat16(), bias)(x.bfloat16())
    assert found.dtype == torch.bfloat16
    expected = x @ weight.t()
    off = (found.float() - (0 if bias is None else bias.float()) - expected) / (
        x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    )
    assert off.abs().max() < 0.02


def test_a_row_that_is_not_finite_is_seen() -> None:
    x = torch.ones(2, 32, device=DEVICE, dtype=torch.bfloat16)
    x[1, 7] = torch.nan
    found = Fp8Linear(torch.ones(16, 32, device=DEVICE, dtype=torch.bfloat16), None)(x)
    assert (found[0] == 32).all()
    assert found[1].isnan().all()
