from __future__ import annotations

import pytest
import torch

from kernels.row_quantization.reference import LIMIT_BY_DTYPE, dequantize_rows, quantize_rows

STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 1 / 16, torch.float8_e4m3fnuz: 1 / 16}
"""The largest error: of what the row spans for steps that are even, of the number itself for e4m3's three bits."""


@pytest.mark.parametrize("dtype", list(LIMIT_BY_DTYPE))
def test_what_is_held_is_near_what_it_stands_for(dtype: torch.dtype) -> None:
    x = torch.randn(50, 96) * torch.logspace(-6, 6, 50).unsqueeze(1)
    held, spans = quantize_rows(x, dtype)
    assert held.dtype == dtype
    assert torch.equal(spans, x.abs().amax(1))
    off = (dequantize_rows(held, spans) - x).abs()
    size = spans.unsqueeze(1) if dtype == torch.int8 else x.abs() + spans.unsqueeze(1) / 1000
    assert (off <= size * STEP[dtype] * 1.001).all()


@pytest.mark.parametrize("dtype", list(LIMIT_BY_DTYPE))
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-38, -1e-40], [1.0, torch.nan], [torch.inf, 1.0]])
    numbers = dequantize_rows(*quantize_rows(x, dtype))
    assert numbers[:2].tolist() == [[0.0, 0.0]] * 2
    assert numbers[2:].isnan().all()
