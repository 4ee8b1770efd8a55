from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

DEVICE = torch.device("cuda")


@triton.jit
def _compute(x, y, out, product, is_less, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    at = n[:, None] * SIZE + n[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a * b + a)
    tl.store(product + at, tl.dot(a, b))
    tl.store(is_less + at, (a < b).to(tl.int32))


@triton.jit
def _convert(x, out, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    tl.store(out + n, tl.load(x + n).to(out.dtype.element_ty))


@pytest.fixture(autouse=True)
def _on_a_gpu(a_gpu: None) -> None:
    """Run every test here on a GPU, if only a simulated one."""


def test_bfloat16_is_rounded_after_every_operation_but_products_of_matrices() -> None:
    x, y = (torch.randn(16, 16, device=DEVICE).bfloat16() for _ in range(2))
    out, product, is_less = (torch.empty(16, 16, device=DEVICE, dtype=d) for d in (x.dtype, torch.float32, torch.int32))
    _compute[(1,)](x, y, out, product, is_less, SIZE=16)
    # A GPU may round once where it multiplies and adds at once.
    torch.testing.assert_close(out.float(), x.float() * y.float() + x.float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(product, x.float() @ y.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(is_less, (x < y).int())


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_conversions_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    whole = torch.arange(-512, 512, device=DEVICE) * 3 + 1
    x = whole.to(source) if source == torch.int32 else (whole / 7).to(source)
    out = torch.empty(1024, dtype=target, device=DEVICE)
    _convert[(1,)](x, out, SIZE=1024)
    assert torch.equal(out, x.to(target))


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38], device=DEVICE)
    out = torch.empty(4, dtype=torch.bfloat16, device=DEVICE)
    _convert[(1,)](x, out, SIZE=4)
    assert torch.equal(out.isnan(), x.isnan())
    assert out[1:].tolist() == [float("inf"), -float("inf"), float("inf")]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit floats")
def test_eight_bits_carry_what_is_rounded_up() -> None:
    x = torch.linspace(-3, 3, 1024, device=DEVICE)
    out = torch.empty(1024, dtype=torch.float8_e4m3fn, device=DEVICE)
    _convert[(1,)](x, out, SIZE=1024)
    assert torch.equal(out.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
