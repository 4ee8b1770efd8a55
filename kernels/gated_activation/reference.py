"""The gated activation of a feed-forward layer.

    out[t, i] = a(gate[t, i]) * up[t, i]

    silu    a(x) = x / (1 + e^-x)
    gelu    a(x) = x (1 + tanh u) / 2 = x / (1 + e^-2u),    u = sqrt(2 / pi) (x + 0.044715 x^3)
    clamped a(x) = g / (1 + e^(-1.702 g)),    g = min(x, 7);    up is clamped to -7 .. 7, plus 1

The activated gate is rounded to the dtype before it is multiplied, as transformers does.

Source: Shazeer, 2020 (GLU variants, arXiv 2002.05202, equations 5 and 6); Hendrycks and Gimpel, 2016 (GELU, arXiv
1606.08415, section 2); OpenAI, 2025 (gpt-oss model card, arXiv 2508.10925, section 2.1: clamped).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

Activation = Literal["silu", "gelu", "clamped"]
CLAMPED_STEEPNESS, CLAMPED_LIMIT = 1.702, 7.0


def activate_and_multiply(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return a(first half) * second half of the last dimension: [rows, 2 * width] to [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * (gate * CLAMPED_STEEPNESS).sigmoid() * (up + 1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
