"""Logits from adapters' own output matrices: each segment of hidden states times its adapter's transposed matrix.

    logits[start_i:end_i] = x[start_i:end_i] m_i^T

Segments are half-open, ascending and disjoint; rows outside every segment are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lora_logits(
    *,
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: Sequence[torch.Tensor],
    segments: Sequence[tuple[int, int]],
) -> None:
    """Write every segment of `x` [rows, hidden] times its matrix [vocab, hidden] to `logits` [rows, vocab] float32."""
    for m, (start, end) in zip(weights, segments, strict=True):
        logits[start:end] = x[start:end] @ m.T
