"""Rows of numbers held in one byte each, with what the row spans.

    span    = max_i |x[i]|
    held[i] = round(x[i] * (limit / span)),      x[i] ~ held[i] * span / limit

`limit` is the largest number of the type: 127 of int8, whose steps are even, 448 of e4m3, whose steps grow with the
number (Micikevicius et al., 2022, FP8 formats for deep learning, arXiv 2209.05433). A row with
NaN or infinity spans NaN, so that whoever reads it sees it, though an int8 cannot say so.
"""

from __future__ import annotations

import torch

LIMIT_BY_DTYPE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
LEAST_SPAN = 1e-30
"""What spans less is held as zeros: the factor would not be finite."""


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (held, spans): `x` [..., width] in `dtype`, one of `LIMIT_BY_DTYPE`, and float32 [...]."""
    wide = x.float()
    spans = wide.abs().amax(dim=-1) + (0.0 * wide).sum(dim=-1)
    limits = torch.full_like(spans, LIMIT_BY_DTYPE[dtype])
    # A number divided by a tensor is its reciprocal's multiple, rounded twice: halves were no halves any more.
    factors = limits / torch.where(spans < LEAST_SPAN, limits, spans)
    scaled = wide * factors.unsqueeze(-1)
    held = scaled.nan_to_num().round() if dtype == torch.int8 else scaled
    return held.to(dtype), spans


def dequantize_rows(held: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Return what rows stand for, float64."""
    return held.to(torch.float32).double() * (spans.double() / LIMIT_BY_DTYPE[held.dtype]).unsqueeze(-1)
