"""Products of 8-bit floats: every way near to the numbers meant, and the fastest one taken."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import ROWS, StreamedLinear, Way, _inputs, measure
from engine.loading.fp8 import Fp8Weight
from kernels.gated_activation.reference import activate_and_multiply
from kernels.row_quantization.reference import dequantize_rows, quantize_rows
from tests.engine.gpu.test_streamed_linear import Timed
from tests.kernels.gpu.conftest import DEVICE

FP8 = torch.float8_e4m3fn
WAYS = [Way.LIBRARY, Way.TILES, Way.WIDE_TILES, Way.ROWS]


def stored(out: int = 80, depth: int = 96) -> Fp8Weight:
    held, scales = torch.randn(out, depth, device=DEVICE).to(FP8), torch.rand(out, device=DEVICE) + 0.1
    return Fp8Weight(held=held, scales=scales, dtype=torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_that_of_the_numbers_meant(way: Way, has_bias: bool) -> None:
    weight, x = torch.randn(48, 96, device=DEVICE), torch.randn(7, 96, device=DEVICE)
    # Every row has its own scale, so that these do not drown the others.
    weight[5] *= 1000
    x[1] *= 1000
    x = x[:2] if way is Way.ROWS else x
    bias = torch.randn(48, device=DEVICE).bfloat16() if has_bias else None
    found = StreamedLinear(weight.bfloat16(), bias, quantization="fp8").multiply(x.bfloat16(), way)
    assert found.dtype == torch.bfloat16
    expected = x @ weight.t()
    off = (found.float() - (0 if bias is None else bias.float()) - expected) / (
        x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    )
    assert off.abs().max() < 0.02


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_stored_in_8_bits_are_not_rounded_again(way: Way) -> None:
    """Inputs that 8 bits hold exactly: what is off is the result's own rounding, and the sum's.

    Hopper sums with some 14 bits of the largest product (DeepSeek-V3, 2024, arXiv 2412.19437, section 3.3.2).
    """
    weight, x = stored(), torch.randint(-8, 9, (2 if way is Way.ROWS else 7, 96), device=DEVICE).float()
    x[:, 0] = 448
    found = StreamedLinear(weight, None, quantization="fp8").multiply(x.bfloat16(), way)
    meant = weight.held.float() * weight.scales.unsqueeze(1)
    expected, sizes = x @ meant.t(), x.abs() @ meant.abs().t()
    # The interpreter cuts off what a GPU rounds.
    assert ((found.float() - expected).abs() <= expected.abs() * 2.0**-7 + sizes * 2.0**-10).all()


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_gated_whatever_the_way(way: Way) -> None:
    linear = StreamedLinear(stored(), None, quantization="fp8", is_gate_up=True)
    x = torch.randn(2, 96, device=DEVICE).bfloat16() / 10
    expected = activate_and_multiply(linear.multiply(x, way).float(), "silu")
    torch.testing.assert_close(linear.gate(x, way).float(), expected, atol=0.02, rtol=0.02)


def test_each_number_of_rows_goes_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = StreamedLinear(stored(), None, quantization="fp8")
    assert linear.rows == ROWS
    assert [linear.open_ways(rows) for rows in (2, 4, 64, 128)] == [WAYS, WAYS[:3], WAYS[:3], WAYS[:2]]
    times = {(Way.ROWS, 1): 1.0, (Way.WIDE_TILES, 64): 1.0} | {(Way.TILES, rows): 1.5 for rows in (1, 4, 64, 128)}
    measure([linear], Timed(monkeypatch, times))
    rest = Way.LIBRARY
    assert linear.ways == (Way.ROWS, rest, Way.TILES, rest, rest, rest, Way.WIDE_TILES, Way.TILES)
    taken: list[Way] = []
    monkeypatch.setattr(linear, "multiply", lambda _, way, *_out: taken.append(way))
    for rows in (1, 3, 33, 100, 129):
        linear(torch.ones(rows, 96, dtype=torch.bfloat16, device=DEVICE))
    assert taken == [Way.ROWS, Way.TILES, Way.WIDE_TILES, Way.TILES, Way.LIBRARY]


def test_what_ways_are_compared_on_is_held_as_it_is() -> None:
    """One of them does not round it."""
    x = _inputs(StreamedLinear(stored(), None, quantization="fp8"), 5, DEVICE)
    assert torch.equal(dequantize_rows(*quantize_rows(x, FP8)), x.double())


def test_among_weights_of_8_bits_others_stay_as_they_are() -> None:
    adapters, plain = TritonLora(CudaRuntime(DEVICE), 1, 8, 4), torch.randn(48, 96, device=DEVICE).bfloat16()
    for is_mixed in (True, False):
        backend = TritonBackend(adapters, 1, "fp8", is_mixed=is_mixed)
        products = [backend.linear("a", stored(), None), backend.linear("b", plain, None)]
        assert backend.linears == products
        assert [linear.rows == ROWS for linear in backend.linears] == [True, not is_mixed]


def test_where_8_bits_are_not_multiplied_they_become_numbers() -> None:
    weight = stored()
    product = TritonBackend(TritonLora(CudaRuntime(DEVICE), 1, 8, 4), 1, is_mixed=True).linear("a", weight, None)
    x = torch.randn(3, 96, device=DEVICE).bfloat16()
    assert torch.equal(product(x), torch.nn.functional.linear(x, weight.dense()))


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_is_not_finite_is_seen(way: Way) -> None:
    x = torch.ones(2, 32, device=DEVICE, dtype=torch.bfloat16)
    x[1, 7] = torch.nan
    linear = StreamedLinear(torch.ones(16, 32, device=DEVICE, dtype=torch.bfloat16), None, quantization="fp8")
    found = linear.multiply(x, way)
    torch.testing.assert_close(found[0].float(), torch.full((16,), 32.0, device=DEVICE), atol=0.125, rtol=0)
    assert found[1].isnan().all()
