"""A mixture of experts by the GPU's kernels: as the definition has it, whatever bits its weights have."""

from __future__ import annotations

import pytest
import torch

from engine.backend import Backend, ExpertWeights
from engine.decoder.experts import ExpertSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.experts import laid_out
from engine.gpu.runtime import CudaRuntime
from engine.loading.fp8 import Fp8Weight
from engine.loading.int4 import Int4Weight
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight, dense
from kernels.mxfp4.reference import MAX_EXPONENT, Mxfp4Matrix
from kernels.streamed_linear.layout import GROUP
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, from_int4, to_fp8, to_int4
from tests.kernels.gpu.conftest import DEVICE, assert_near
from tests.oracles.plain_matrices import from_fp8, from_mxfp4

SPEC = ExpertSpec(count=3, chosen=2, inner_size=GROUP, is_normed=True)
FP8 = torch.float8_e4m3fn


def stored_fp8(out: int, depth: int) -> Fp8Weight:
    held, scales = torch.randn(out, depth, device=DEVICE).to(FP8), (torch.rand(out, device=DEVICE) + 0.5) / depth**0.5
    return Fp8Weight(held=held, scales=scales, dtype=torch.bfloat16)


def stored_int4(out: int, depth: int) -> Int4Weight:
    levels = torch.randint(0, 16, (out, depth), dtype=torch.uint8, device=DEVICE)
    scales = ((torch.rand(depth // GROUP, out, device=DEVICE) + 0.5) / (4 * depth**0.5)).bfloat16()
    zeros = torch.randint(6, 10, scales.shape, dtype=torch.int32, device=DEVICE)
    return Int4Weight(levels=levels, scales=scales, zeros=zeros, dtype=torch.bfloat16)


def stored_mxfp4(out: int, depth: int) -> Mxfp4Weight:
    blocks = torch.randint(0, 256, (out, depth // 2), dtype=torch.uint8, device=DEVICE)
    exponents = torch.randint(121, 125, (out, depth // 32), dtype=torch.uint8, device=DEVICE)
    return Mxfp4Weight(blocks=blocks, exponents=exponents, dtype=torch.bfloat16)


def numbers(out: int, depth: int) -> torch.Tensor:
    return (torch.randn(SPEC.count, out // SPEC.count, depth, device=DEVICE) / depth**0.5).bfloat16()


def backend(quantization: str | None, *, is_mixed: bool = False) -> TritonBackend:
    lora = TritonLora(CudaRuntime(DEVICE), max_segments=1, max_rank=16, max_tokens=8)
    return TritonBackend(lora, 8, quantization, is_mixed=is_mixed)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("make", "quantization"),
    [(numbers, None), (stored_fp8, None), (stored_fp8, "fp8"), (stored_int4, "int4"), (stored_mxfp4, None)],
)
def test_a_mixture_adds_what_the_definition_says(make: type, quantization: str | None, rows: int) -> None:
    """Whether the device keeps what has few bits or makes numbers of it."""
    gate_up, down = make(SPEC.count * 2 * GROUP, GROUP), make(SPEC.count * GROUP, GROUP)
    router = torch.randn(SPEC.count, GROUP, device=DEVICE).bfloat16() / 4
    h = torch.randn(rows, GROUP, device=DEVICE).bfloat16()
    ours = backend(quantization)
    weights = ExpertWeights(router, gate_up, down)
    found = ours.experts(weights, SPEC, "silu")(h)
    assert_near(found, Backend.experts(ours, weights, SPEC, "silu")(h).double())


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_experts_that_a_model_chooses_add_what_the_definition_says(quantization: str | None, rows: int) -> None:
    gate_up, down = numbers(SPEC.count * 2 * GROUP, GROUP), numbers(SPEC.count * GROUP, GROUP)
    h = torch.randn(rows, GROUP, device=DEVICE).bfloat16()
    choice = torch.tensor([[2, 0], [0, 1], [1, 2], [2, 1], [0, 2]], device=DEVICE)[:rows]
    weights = torch.rand(rows, 2, device=DEVICE).bfloat16()
    ours = backend(quantization)
    found = ours.routed_experts(gate_up, down, "gelu")(h, choice, weights, None)
    if quantization is not None:
        to_few, of_few = (to_fp8, from_fp8) if quantization == "fp8" else (to_int4, from_int4)
        gate_up, down = (of_few(to_few(part.flatten(0, 1))).view_as(part) for part in (gate_up, down))
    expected = Backend.routed_experts(ours, gate_up.double(), down.double(), "gelu")(h.double(), choice, weights, None)
    assert_near(found, expected)


@pytest.mark.parametrize("make", [numbers, stored_fp8, stored_int4])
def test_experts_lie_one_below_the_other_each_rounded_by_itself(make: type) -> None:
    weight: Weight = make(SPEC.count * 2 * GROUP, GROUP)
    meant = dense(weight).flatten(0, -2).double()
    few, fewer = laid_out(weight, SPEC.count, "fp8"), laid_out(weight, SPEC.count, "int4")
    assert isinstance(few, Fp8Matrix)
    assert isinstance(fewer, Int4Matrix)
    whole = laid_out(weight, SPEC.count, None)
    assert isinstance(whole, torch.Tensor)
    torch.testing.assert_close(whole.double(), meant)
    for matrix, step in ((from_fp8(few), 2.0**-4), (from_int4(fewer).double(), 1 / 15)):
        assert matrix.shape == meant.shape
        assert ((matrix - meant).abs().amax(dim=1) <= 1.1 * step * meant.abs().amax(dim=1)).all()


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_mxfp4_stays_whatever_others_are_rounded_to(quantization: str | None) -> None:
    weight = stored_mxfp4(SPEC.count * 2 * GROUP, 96)
    laid = laid_out(weight, SPEC.count, quantization)
    assert isinstance(laid, Mxfp4Matrix)
    assert torch.equal(from_mxfp4(laid), weight.dense())


def test_mxfp4_of_numbers_that_no_model_has_becomes_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """The device's layout has no room for their exponents."""
    weight = stored_mxfp4(6, 64)
    weight.exponents[2, 1] = MAX_EXPONENT + 1
    laid = laid_out(weight, 3, None)
    assert isinstance(laid, torch.Tensor)
    assert torch.equal(laid, weight.dense())
    assert "are dequantized" in caplog.text


@pytest.mark.parametrize(("quantization", "few"), [("fp8", stored_fp8), ("int4", stored_int4)])
def test_numbers_of_a_checkpoint_of_few_bits_stay(quantization: str, few: type) -> None:
    """So does what chooses, always: it is among the products whose way is measured."""
    mixed = backend(quantization, is_mixed=True)
    assert mixed._quantization_of(numbers(6, GROUP)) is None
    assert mixed._quantization_of(few(6, GROUP)) == quantization
    gate_up, down = numbers(SPEC.count * 2 * GROUP, GROUP), numbers(SPEC.count * GROUP, GROUP)
    mixed.experts(ExpertWeights(gate_up.flatten(0, 1)[: SPEC.count], gate_up, down), SPEC, "silu")
    assert [tuple(linear.shape) for linear in mixed.linears] == [(SPEC.count, GROUP)]
