from __future__ import annotations

import math

import torch

from kernels.token_logprobs.reference import tell


def test_a_row_tells_its_token_and_the_likeliest_by_ascending_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]], dtype=torch.float64)
    total = math.log(sum(map(math.exp, logits[0].tolist())))
    expected = [-1 - total, 4, 1, 2, 2 - total, 2 - total]
    torch.testing.assert_close(tell(logits, torch.tensor([3]), 2), torch.tensor([expected], dtype=torch.float64))
