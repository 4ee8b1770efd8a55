from __future__ import annotations

import pytest
import torch

from kernels.token_logprobs.launch import MAX_TOP, PART, tell
from kernels.token_logprobs.reference import tell as expected_of
from tests.kernels.gpu.conftest import DEVICE


@pytest.mark.parametrize("vocab", [1, 32, 33, PART, PART + 1, 3 * PART - 7])
@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_TOP])
def test_rows_are_told_as_by_the_reference(vocab: int, num_top: int) -> None:
    num_top, draw = min(num_top, vocab), torch.Generator().manual_seed(vocab + num_top)
    logits = torch.randn(4, vocab, generator=draw) * 4
    # Many equal ones, of both signs and zeros; what a model never says; one part of nothing else.
    logits[1] = (logits[1] / 2).round() / 2
    logits[2, : vocab // 2] = -torch.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    token_ids = torch.randint(0, vocab, (4,), generator=draw)
    token_ids[2] = vocab - 1
    found = tell(logits.to(DEVICE), token_ids.to(DEVICE), num_top).cpu()
    expected = expected_of(logits.double(), token_ids, num_top)
    assert found.shape == expected.shape
    assert torch.equal(found[:, 1 : 2 + num_top], expected[:, 1 : 2 + num_top])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_a_row_with_nan_leaves_the_others_as_they_are() -> None:
    logits = torch.randn(3, PART + 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    token_ids = torch.tensor([3, 4, 5], device=DEVICE)
    expected = tell(logits, token_ids, 4)
    logits[1, 77] = torch.nan
    found = tell(logits, token_ids, 4)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.isfinite(found[1, 2:6]).all()


def test_of_no_rows_nothing_is_told() -> None:
    assert tell(torch.zeros(0, 9, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE), 2).shape == (0, 6)
