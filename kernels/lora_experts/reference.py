"""LoRA of a mixture's experts: adds the adapters' products to those of one expert with the rows routed to it.

    y[i, column:column + out] += (x[i] A^T) B^T

for each row i of a segment and each (A, B, column) that the segment's adapter has for the expert. The intermediate
product has the dtype of `x`. Ranks may differ; rows outside all segments are not touched.

Rows are ascending, so those of a segment are adjacent: a stable sort by expert keeps the rows of each adapter together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora_expand.reference import lora_expand
from kernels.lora_shrink.reference import lora_shrink

Matrices = Sequence[tuple[torch.Tensor, torch.Tensor, int]]
"""A [rank, in], B [out, rank], and the first column that the product is added to."""


def lora_experts(
    *,
    x: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    weights: Sequence[Matrices],
) -> None:
    """Add in place to `y` [chosen rows, out] the low-rank products of `x` [chosen rows, in].

    Args:
        rows: the batch row of each row of `x`, int64 [chosen rows], ascending.
        segments: half-open ranges of batch rows, ascending and disjoint.
    """
    ends = torch.searchsorted(rows, torch.tensor(segments, dtype=rows.dtype).view(-1, 2)).tolist()
    for (start, end), matrices in zip(ends, weights, strict=True):
        for a, b, column in matrices:
            shrunk = lora_shrink(x=x, weights=[a], segments=[(start, end)])
            lora_expand(y=y, shrunk=shrunk, weights=[b], segments=[(start, end)], column=column)
