"""LoRA expand: each segment's low-rank activations times the transposed B of its adapter, added to the output.

    y[start_i:end_i, column:column + out] += h_i B_i^T

What some adapters do to y itself before that, y * gain + shift for each column, is the engine's affair on a CPU
(`adapters.weights.Columns`); the GPU's kernel does it in the same pass.

Segments are half-open, ascending and disjoint; rows outside every segment are not touched. Ranks differ freely.
Source: Punica (Chen et al., 2023, arXiv 2310.18547, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lora_expand(
    *,
    y: torch.Tensor,
    shrunk: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    segments: Sequence[tuple[int, int]],
    column: int = 0,
) -> None:
    """Add every segment's `shrunk` [len, rank] times its B [out, rank] in place to `y` [tokens, all_out].

    The output's columns `column` up to `column + out` change, as with projections that were stacked into one matrix.
    """
    for h, b, (start, end) in zip(shrunk, weights, segments, strict=True):
        y[start:end, column : column + b.shape[0]].addmm_(h, b.T)
