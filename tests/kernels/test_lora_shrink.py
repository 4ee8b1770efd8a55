from __future__ import annotations

import torch

from kernels.lora_shrink.reference import lora_shrink


def test_each_segment_is_multiplied_by_its_own_matrix_at_its_own_rank() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 5)
    weights = [torch.randn(rank, 5) for rank in (1, 4, 7)]
    shrunk = lora_shrink(x=x, weights=weights, segments=[(0, 3), (3, 3), (6, 9)])
    assert [tuple(part.shape) for part in shrunk] == [(3, 1), (0, 4), (3, 7)]
    for token in range(3):
        torch.testing.assert_close(shrunk[0][token], weights[0] @ x[token])
        torch.testing.assert_close(shrunk[2][token], weights[2] @ x[6 + token])
