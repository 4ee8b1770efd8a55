"""Vectors are summed chunk by chunk, and on their way to the host before another step is handed over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.pooling import Pooler, packed
from engine.request import Pooling, Request, RequestId, SamplingParams
from engine.step import StepPlan, StepRow

PROMPT = tuple(range(5))


def chunk(start: int, end: int, pooling: Pooling) -> StepPlan:
    asked = Request(request_id=RequestId("a"), prompt_ids=PROMPT, params=SamplingParams(max_tokens=0), pooling=pooling)
    row = StepRow(
        row=0,
        is_admission=start == 0,
        request=asked,
        output_ids=(),
        start=start,
        end=end,
        block_tables=[[0]],
        samples=False,
    )
    return StepPlan(step_id=1 + start, rows=(row,))


def test_a_vector_is_fetched_as_it_is_computed_and_waited_for_by_who_asks() -> None:
    """By then the device may have been given the next step, which nobody should have to wait for."""
    begun: list[torch.Tensor] = []

    def fetch(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        begun.append(numbers)
        return lambda: numbers

    states = torch.randn(5, 3)
    for pooling, expected in ((Pooling.MEAN, states.mean(dim=0)), (Pooling.LAST, states[-1])):
        pooler, plans = Pooler(fetch), [chunk(0, 3, pooling), chunk(3, 5, pooling)]
        begun.clear()
        assert pooler.add(plans[0], [states[:3]][: plans[0].rows[0].num_pooled]) == {}
        assert begun == []
        (vector,) = pooler.add(plans[1], [states[5 - plans[1].rows[0].num_pooled :]]).values()
        assert len(begun) == 1
        found = np.frombuffer(packed(vector()) or b"", dtype="<f4")
        torch.testing.assert_close(torch.from_numpy(found.copy()), expected)


def test_numbers_that_are_not_finite_are_no_vector() -> None:
    states = torch.tensor([[1.0, torch.inf]] * 5)
    (vector,) = Pooler(lambda numbers: lambda: numbers).add(chunk(0, 5, Pooling.MEAN), [states]).values()
    assert packed(vector()) is None
