"""LoRA expand: multiplies each segment's low-rank activations by its adapter's transposed B and adds to the output.

    y[start_i:end_i, column:column + out] += h_i B_i^T

Some adapters also scale and shift the columns of y before that, y * gain + shift (`adapters.weights.Columns`). This
reference leaves that to the engine; the kernels do it in the same pass.

Segments are half-open, ascending and disjoint; rows outside every segment are not touched. Ranks may differ.
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

    Only columns `column` to `column + out` change, as for projections stacked into one matrix.
    """
    for h, b, (start, end) in zip(shrunk, weights, segments, strict=True):
        y[start:end, column : column + b.shape[0]].addmm_(h, b.T)
