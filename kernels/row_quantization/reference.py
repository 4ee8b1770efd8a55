"""Quantization of rows to one byte per element, scaled by the row's span (absolute maximum).

    span    = max_i |x[i]|
    held[i] = round(x[i] * (limit / span)),      x[i] ~ held[i] * span / limit

`limit` is the largest number of the type: 127 for int8, whose steps are uniform, 448 for e4m3, whose steps grow with
the number (Micikevicius et al., 2022, FP8 formats for deep learning, arXiv 2209.05433), 240 for e4m3fnuz. A row with
NaN or infinity has a span of NaN, so that consumers notice even though int8 has no NaN.
"""

from __future__ import annotations

import torch

LIMIT_BY_DTYPE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
LEAST_SPAN = 1e-30
"""Rows with a smaller span become zeros, because their factor would not be finite."""


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [..., width] to `dtype`, one of `LIMIT_BY_DTYPE`; return (held, spans) with spans float32 [...]."""
    wide = x.float()
    spans = wide.abs().amax(dim=-1) + (0.0 * wide).sum(dim=-1)
    limits = torch.full_like(spans, LIMIT_BY_DTYPE[dtype])
    # Torch divides a scalar by a tensor as scalar * reciprocal, which rounds twice and would break exact ties.
    factors = limits / torch.where(spans < LEAST_SPAN, limits, spans)
    scaled = wide * factors.unsqueeze(-1)
    held = scaled.nan_to_num().round() if dtype == torch.int8 else scaled
    return held.to(dtype), spans


def dequantize_rows(held: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Dequantize rows to float64."""
    return held.to(torch.float32).double() * (spans.double() / LIMIT_BY_DTYPE[held.dtype]).unsqueeze(-1)
