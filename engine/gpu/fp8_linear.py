"""Linear products of 8-bit floats (e4m3): weights as a checkpoint has them or rounded at load, inputs as they come.

    y[t, o] = (x8[t] . w8[o]) * span(x[t]) * span(w[o]) / limit^2 + b[o]

Rows of both have scales of their own, as `kernels.row_quantization.reference` defines them: a large input, or a large
weight, costs only its own row's precision (Micikevicius et al., 2022, arXiv 2209.05433).
"""

from __future__ import annotations

import torch

from engine.loading.fp8 import FP8, Fp8Weight
from engine.loading.weight import Weight, dense
from kernels.row_quantization.launch import quantize_rows
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

LIMIT = LIMIT_BY_DTYPE[FP8]


class Fp8Linear:
    """y = x W^T + b for a fixed W [out, in]; `engine.resolve` sees to it that the sizes do.

    Args:
        weight: [out, in]; given away.
        bias: [out] or None.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        if isinstance(weight, Fp8Weight):
            held, scales = weight.held, weight.scales
        else:
            held, spans = quantize_rows(dense(weight), FP8)
            scales = spans / LIMIT
        self._weight = held.t()
        # With the limit of the other side, so that the inputs' spans are used as they come.
        self._scale = (scales / LIMIT).unsqueeze(0)
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
