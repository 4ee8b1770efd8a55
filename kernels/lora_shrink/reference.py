"""LoRA shrink: multiplies each segment of a batch of tokens by the transposed A of its own adapter.

    out_i = x[start_i:end_i] A_i^T          [end_i - start_i, rank_i]

Segments are half-open, ascending and disjoint; tokens outside every segment cost nothing. Ranks may differ.
Source: Punica (Chen et al., 2023, arXiv 2310.18547, section 4: segmented gather matrix-vector product).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lora_shrink(
    *, x: torch.Tensor, weights: Sequence[torch.Tensor], segments: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Multiply every segment of `x` [tokens, in] by its A [rank, in]; return one [len, rank] for each segment.

    Results have the dtype of `x`. An empty segment gives an empty result.
    """
    return [x[start:end] @ a.T for a, (start, end) in zip(weights, segments, strict=True)]
