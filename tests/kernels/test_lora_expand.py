from __future__ import annotations

import pytest
import torch

from kernels.lora_expand.reference import lora_expand
from kernels.lora_shrink.reference import lora_shrink


@pytest.mark.parametrize("segments", [[(0, 3), (3, 4), (6, 9)], [(2, 2)], [(0, 9)], []])
def test_each_segment_is_multiplied_by_its_own_pair_and_the_rest_is_untouched(segments: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 5), torch.randn(9, 12)
    ranks = [1, 4, 7][: len(segments)]
    a = [torch.randn(rank, 5) for rank in ranks]
    b = [torch.randn(6, rank) for rank in ranks]
    expected = y.clone()
    for (start, end), a_i, b_i in zip(segments, a, b, strict=True):
        for token in range(start, end):
            expected[token, 4:10] += b_i @ (a_i @ x[token])
    shrunk = lora_shrink(x=x, weights=a, segments=segments)
    lora_expand(y=y, shrunk=shrunk, weights=b, segments=segments, column=4)
    torch.testing.assert_close(y, expected)
