from __future__ import annotations

import pytest
import torch

from kernels.state_rows import token_stride


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_tokens_are_as_far_apart_as_the_memory_says(rows: int, tokens: int) -> None:
    x = torch.arange(rows * tokens * 10).view(rows, tokens, 10)[..., 2:8].unflatten(-1, (2, 3))
    stride = token_stride(x)
    flat = torch.as_strided(x, (rows * tokens, 6), (stride, 1), x.storage_offset())
    assert torch.equal(flat, x.reshape(-1, 6))
    assert stride == 10 or rows * tokens == 1
