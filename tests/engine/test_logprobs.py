from __future__ import annotations

import pytest
import torch

from engine.request import TokenLogprobs
from engine.sampling.logprobs import read_told
from kernels.token_logprobs.reference import tell


def logprobs_of(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    return read_told(tell(logits, torch.tensor(token_ids, dtype=torch.int64), num_top))


def test_each_row_tells_its_token_and_the_likeliest_by_ascending_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 0.0, 0.0, 0.0]])
    expected = torch.log_softmax(logits, dim=-1)
    first, second = logprobs_of(logits, [3, 0], 2)
    assert first.logprob == pytest.approx(float(expected[0, 3]))
    assert [token_id for token_id, _ in first.top] == [1, 2]
    assert second.top[0] == (0, pytest.approx(second.logprob))
    assert (first.rank, second.rank) == (4, 1)
    assert [entry.rank for entry in logprobs_of(logits, [2, 1], 0)] == [1, 2]


def test_none_of_the_likeliest_and_more_than_there_are() -> None:
    logits = torch.randn(2, 4)
    assert [entry.top for entry in logprobs_of(logits, [0, 1], 0)] == [(), ()]
    assert [len(entry.top) for entry in logprobs_of(logits, [0, 1], 20)] == [4, 4]
    assert logprobs_of(torch.empty(0, 4), [], 3) == []
