"""Vectors are summed chunk by chunk, and on their way to the host before another step is handed over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights, Extras
from engine.pooling import Pooler, heads_of, packed
from engine.request import Pooling, Request, RequestId, SamplingParams
from engine.step import StepPlan, StepRow

PROMPT = tuple(range(5))


HEAD = torch.randn(2, 3)


def weights_of(digest: AdapterDigest) -> AdapterWeights:
    return AdapterWeights({}, torch.bfloat16, Extras(head=HEAD if digest == "with a head" else None))


def chunk(start: int, end: int, pooling: Pooling, adapter: str | None = None) -> StepPlan:
    asked = Request(
        request_id=RequestId("a"),
        prompt_ids=PROMPT,
        params=SamplingParams(max_tokens=0),
        pooling=pooling,
        adapter=None if adapter is None else AdapterDigest(adapter),
    )
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
        assert pooler.add(plans[0], [states[:3]][: plans[0].rows[0].num_pooled], {}) == {}
        assert begun == []
        (vector,) = pooler.add(plans[1], [states[5 - plans[1].rows[0].num_pooled :]], {}).values()
        assert len(begun) == 1
        found = np.frombuffer(packed(vector()) or b"", dtype="<f4")
        torch.testing.assert_close(torch.from_numpy(found.copy()), expected)


def test_numbers_that_are_not_finite_are_no_vector() -> None:
    states = torch.tensor([[1.0, torch.inf]] * 5)
    pooler = Pooler(lambda numbers: lambda: numbers)
    (vector,) = pooler.add(chunk(0, 5, Pooling.MEAN), [states], {}).values()
    assert packed(vector()) is None


def test_a_classifier_scores_the_last_token_though_its_adapter_may_be_gone_by_then() -> None:
    states = torch.randn(5, 3).to(torch.bfloat16)
    pooler, plan = Pooler(lambda numbers: lambda: numbers), chunk(3, 5, Pooling.CLASS, "with a head")
    assert heads_of(chunk(0, 3, Pooling.CLASS, "with a head"), weights_of) == {}
    assert heads_of(chunk(3, 5, Pooling.LAST, "with a head"), weights_of) == {}
    assert pooler.add(chunk(0, 3, Pooling.CLASS, "with a head"), [], {}) == {}
    (scores,) = pooler.add(plan, [states[-1:]], heads_of(plan, weights_of)).values()
    torch.testing.assert_close(scores(), HEAD @ states[-1].float())


@pytest.mark.parametrize("adapter", ["without", None])
def test_scores_without_a_classifier_fail_alone(adapter: str | None) -> None:
    pooler, plan = Pooler(lambda numbers: lambda: numbers), chunk(0, 5, Pooling.CLASS, adapter)
    (scores,) = pooler.add(plan, [torch.randn(1, 3)], heads_of(plan, weights_of)).values()
    assert packed(scores()) is None
