"""The gated activation of a feed-forward layer.

    out[t, i] = silu(gate[t, i]) * up[t, i],    silu(a) = a / (1 + e^-a)

Source: Shazeer, 2020 (GLU variants, arXiv 2002.05202, equation 6).
"""

from __future__ import annotations

import torch


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension: [rows, 2 * width] to [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
