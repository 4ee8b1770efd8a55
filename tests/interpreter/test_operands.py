from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

DEVICE = torch.device("cuda")


@triton.jit
def _combine(x, column, row, out, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    a, b = tl.load(column + n)[:, None], tl.load(row + n)[None, :]
    at = n[:, None] * SIZE + n
    tl.store(out + at, tl.load(x + at) * 2 + a - b / 4 + n)


@triton.jit
def _overflow(x, out, STEP: tl.constexpr):
    tl.store(out, tl.load(x) + STEP)


@triton.jit
def _add_what_does_not_fit(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@pytest.fixture(autouse=True)
def _on_a_gpu(a_gpu: None) -> None:
    """Run every test here on a GPU, if only a simulated one."""


@pytest.mark.parametrize("column", [torch.float32, torch.int8, torch.int64])
@pytest.mark.parametrize("row", [torch.float32, torch.float16, torch.int32])
def test_operands_of_other_shapes_and_types_meet_as_in_torch(column: torch.dtype, row: torch.dtype) -> None:
    x = torch.arange(64, device=DEVICE, dtype=torch.int32).reshape(8, 8)
    a, b = (torch.arange(8, device=DEVICE).to(dtype) for dtype in (column, row))
    out = torch.empty(8, 8, device=DEVICE)
    _combine[(1,)](x, a, b, out, SIZE=8)
    expected = x.float() * 2 + a.float()[:, None] - b.float()[None, :] / 4 + torch.arange(8, device=DEVICE)
    assert torch.equal(out, expected)


def test_sums_of_integers_wrap_around() -> None:
    x, out = torch.tensor([2**31 - 1], device=DEVICE, dtype=torch.int32), torch.zeros(1, device=DEVICE).int()
    _overflow[(1,)](x, out, STEP=2)
    assert out.item() == -(2**31) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler says it otherwise")
def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        _add_what_does_not_fit[(1,)](torch.zeros(8, device=DEVICE).int())
