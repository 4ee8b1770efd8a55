"""Pool hidden states into one vector per request that asks for it, chunk by chunk as its tokens are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.request import Pooling, RequestId
from engine.step import StepPlan

Vector = Callable[[], torch.Tensor]
"""Waits for a vector that a device may still be computing, [hidden] float32, and returns it."""


def packed(vector: torch.Tensor) -> bytes | None:
    """Return a vector as little-endian float32, or None if it is not finite."""
    return np.asarray(vector, dtype="<f4").tobytes() if bool(torch.isfinite(vector).all()) else None


def pooled_ranges(plan: StepPlan) -> tuple[tuple[int, int], ...]:
    """Return the tokens of the step's batch to pool: a half-open range for each row that has any."""
    ranges, at = [], 0
    for row in plan.rows:
        at += row.num_tokens
        if row.num_pooled:
            ranges.append((at - row.num_pooled, at))
    return tuple(ranges)


class Pooler:
    """Running sums of hidden states, by the request's row.

    Args:
        fetch: starts a copy to the host; returns a function that waits for it.
    """

    def __init__(self, fetch: Callable[[torch.Tensor], Vector]) -> None:
        self._fetch = fetch
        self._sum_by_row: dict[int, torch.Tensor] = {}

    def release(self, row: int) -> None:
        """Forget a row; idempotent."""
        self._sum_by_row.pop(row, None)

    def add(self, plan: StepPlan, hidden: Sequence[torch.Tensor]) -> dict[RequestId, Vector]:
        """Add the hidden states of the ranges of `pooled_ranges`; return the vectors that are now complete.

        Args:
            hidden: [tokens of the range, hidden] each; not retained.
        """
        whole: dict[RequestId, Vector] = {}
        pooled = [row for row in plan.rows if row.num_pooled]
        for row, states in zip(pooled, hidden, strict=True):
            total = states.sum(dim=0, dtype=torch.float32)
            if not row.is_admission and row.row in self._sum_by_row:
                total += self._sum_by_row[row.row]
            self._sum_by_row[row.row] = total
            if row.ends_prompt:
                count = row.end if row.request.pooling is Pooling.MEAN else 1
                whole[row.request.request_id] = self._fetch(self._sum_by_row.pop(row.row) / count)
        return whole
