"""LoRA gather: looks up rows by token id, for each segment of a batch in the matrix of its own adapter.

    out_i = m_i[ids[start_i:end_i]]          [end_i - start_i, width_i]

For adapters of the embedding this is the shrink, whose input is one-hot. Segments are half-open, ascending and
disjoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lora_gather(
    *, token_ids: torch.Tensor, weights: Sequence[torch.Tensor], segments: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return, for each segment of `token_ids` [tokens] int64, the rows [len, width] of its matrix [vocab, width]."""
    return [m[token_ids[start:end]] for m, (start, end) in zip(weights, segments, strict=True)]
