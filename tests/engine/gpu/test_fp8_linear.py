from __future__ import annotations

import pytest
import torch

from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.fp8_linear import Fp8Linear
from engine.gpu.streamed_linear import StreamedLinear
from engine.loading.fp8 import Fp8Weight
from kernels.row_quantization.launch import quantize_rows
from kernels.row_quantization.reference import quantize_rows as by_definition
from tests.engine.gpu.host_runtime import runtime_here
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


def test_halves_are_halves() -> None:
    """Short numbers often lie halfway between two steps: a factor that is off by its last bit decides for one side.

    Not so of whole numbers, whose product and sum a GPU rounds at once.
    """
    x = torch.randn(100, 96, device=DEVICE).bfloat16().float()
    held, _ = quantize_rows(x, FP8)
    assert torch.equal(held.float(), by_definition(x, FP8)[0].float())


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


def stored(out: int = 48, depth: int = 96) -> Fp8Weight:
    held, scales = torch.randn(out, depth, device=DEVICE).to(FP8), torch.rand(out, device=DEVICE) + 0.1
    return Fp8Weight(held=held, scales=scales, dtype=torch.bfloat16)


def test_weights_that_are_stored_in_8_bits_are_not_rounded_again() -> None:
    """Inputs that 8 bits hold exactly: what is off is the result's own rounding, and the sum's.

    Hopper sums with some 14 bits of the largest product (DeepSeek-V3, 2024, arXiv 2412.19437, section 3.3.2).
    """
    weight, x = stored(), torch.randint(-8, 9, (7, 96), device=DEVICE).float()
    x[:, 0] = 448
    found = Fp8Linear(weight, None)(x.bfloat16())
    meant = weight.held.float() * weight.scales.unsqueeze(1)
    expected, sizes = x @ meant.t(), x.abs() @ meant.abs().t()
    assert ((found.float() - expected).abs() <= expected.abs() * 2.0**-8 + sizes * 2.0**-10).all()


def test_among_weights_of_8_bits_others_stay_as_they_are() -> None:
    adapters, plain = TritonLora(runtime_here(), 1, 8, 4), torch.randn(48, 96, device=DEVICE).bfloat16()
    for is_mixed, kind in ((True, StreamedLinear), (False, Fp8Linear)):
        backend = TritonBackend(adapters, 1, "fp8", is_mixed=is_mixed)
        assert isinstance(backend.linear("a", stored(), None), Fp8Linear)
        assert isinstance(backend.linear("b", plain, None), kind)


def test_where_8_bits_are_not_multiplied_they_become_numbers() -> None:
    weight = stored()
    product = TritonBackend(TritonLora(runtime_here(), 1, 8, 4), 1, is_mixed=True).linear("a", weight, None)
    x = torch.randn(3, 96, device=DEVICE).bfloat16()
    assert torch.equal(product(x), torch.nn.functional.linear(x, weight.dense()))


def test_a_row_that_is_not_finite_is_seen() -> None:
    x = torch.ones(2, 32, device=DEVICE, dtype=torch.bfloat16)
    x[1, 7] = torch.nan
    found = Fp8Linear(torch.ones(16, 32, device=DEVICE, dtype=torch.bfloat16), None)(x)
    assert (found[0] == 32).all()
    assert found[1].isnan().all()
