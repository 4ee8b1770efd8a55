"""Linear products of 8-bit floats (e4m3): weights rounded at load, inputs as they come.

    y[t, o] = (x8[t] . w8[o]) * span(x[t]) * span(w[o]) / limit^2 + b[o]

Rows of both have scales of their own, as `kernels.row_quantization.reference` defines them: a large input, or a large
weight, costs only its own row's precision (Micikevicius et al., 2022, arXiv 2209.05433).
"""

from __future__ import annotations

import torch

from kernels.row_quantization.launch import quantize_rows
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

FP8 = torch.float8_e4m3fn


class Fp8Linear:
    """y = x W^T + b for a fixed W [out, in]; `engine.resolve` sees to it that the sizes do.

    Args:
        weight: [out, in]; given away.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        held, spans = quantize_rows(weight, FP8)
        self._weight = held.t()
        # The limits of both sides, so that the inputs' spans are used as they come.
        self._scale = (spans / LIMIT_BY_DTYPE[FP8] ** 2).unsqueeze(0)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [tokens, in]; returns [tokens, out] in the dtype of `x`."""
        held, spans = quantize_rows(x, FP8)
        return torch._scaled_mm(
            held,
            self._weight,
            scale_a=spans.unsqueeze(1),
            scale_b=self._scale,
            bias=self._bias,
            out_dtype=x.dtype,
        )
