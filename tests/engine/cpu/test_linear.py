from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.cpu.linear import Linear, has_fast_bfloat16


@pytest.mark.parametrize("num_rows", [0, 1, 3, 33, 200])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_torch(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 40).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 40).to(dtype)
    found = Linear(weight.clone(), bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, functional.linear(x, weight, bias), atol=1e-5, rtol=1.6e-2)


def test_an_input_need_not_be_contiguous() -> None:
    weight, x = torch.randn(8, 6).bfloat16(), torch.randn(5, 12).bfloat16()[:, ::2]
    torch.testing.assert_close(Linear(weight.clone())(x), functional.linear(x, weight))


def test_the_result_can_be_added_to_in_place() -> None:
    """LoRA adds to it, on a slice of its columns."""
    with torch.inference_mode():
        y = Linear(torch.randn(8, 6).bfloat16())(torch.randn(5, 6).bfloat16())
        before = y.clone()
        y[1:3, 2:4] += 1
    assert torch.equal(y[1:3, 2:4], before[1:3, 2:4] + 1)


def test_whether_bfloat16_is_fast_is_a_plain_answer() -> None:
    assert has_fast_bfloat16() in (True, False)
