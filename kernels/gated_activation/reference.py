"""The gated activation of a feed-forward layer.

    out[t, i] = a(gate[t, i]) * up[t, i]

    silu    a(x) = x / (1 + e^-x)
    gelu    a(x) = x (1 + tanh u) / 2 = x / (1 + e^-2u),    u = sqrt(2 / pi) (x + 0.044715 x^3)

What is activated is rounded to the dtype before it is multiplied, as transformers does.

Source: Shazeer, 2020 (GLU variants, arXiv 2002.05202, equations 5 and 6); Hendrycks and Gimpel, 2016 (GELU, arXiv
1606.08415, section 2).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

Activation = Literal["silu", "gelu"]


def activate_and_multiply(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return a(first half) * second half of the last dimension: [rows, 2 * width] to [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
