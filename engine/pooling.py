"""Pool hidden states into one vector per request that asks for it, chunk by chunk as its tokens are computed.

An adapter's classifier turns it into scores on the host, in float32: a few rows, for which no kernel is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from engine.lora import WeightsOf
from engine.request import Pooling, RequestId
from engine.step import StepPlan

Vector = Callable[[], torch.Tensor]
"""Waits for a vector that a device may still be computing, [hidden] or [labels] float32, and returns it."""


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


def heads_of(plan: StepPlan, weights_of: WeightsOf) -> dict[RequestId, torch.Tensor]:
    """Return the classifiers, [labels, hidden] each, of the requests that the step completes.

    To be called before the step is computed: a request canceled while it is paused holds its adapter no more.
    """
    asked = (row.request for row in plan.rows if row.request.pooling is Pooling.CLASS and row.ends_prompt)
    heads = ((r.request_id, weights_of(r.adapter).extras.head) for r in asked if r.adapter is not None)
    return {request_id: head for request_id, head in heads if head is not None}


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

    def add(
        self, plan: StepPlan, hidden: Sequence[torch.Tensor], heads: Mapping[RequestId, torch.Tensor]
    ) -> dict[RequestId, Vector]:
        """Add the hidden states of the ranges of `pooled_ranges`; return the vectors that are now complete.

        Args:
            hidden: [tokens of the range, hidden] each; not retained.
            heads: as returned by `heads_of`.
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
                vector = self._fetch(self._sum_by_row.pop(row.row) / count)
                request_id = row.request.request_id
                is_class = row.request.pooling is Pooling.CLASS
                whole[request_id] = partial(_scores, heads.get(request_id), vector) if is_class else vector
        return whole


def _scores(head: torch.Tensor | None, vector: Vector) -> torch.Tensor:
    # Gateways refuse what has no classifier. If such a request comes another way, it fails alone, not the step.
    return torch.full((1,), torch.nan) if head is None else head @ vector()
