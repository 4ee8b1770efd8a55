from __future__ import annotations

import pytest
import torch

from kernels.lora_gather.reference import lora_gather
from kernels.program import Pool
from tests.kernels.conftest import DTYPES
from tests.kernels.native_lora import Segments

VOCAB, STRIDE = 11, 6


def test_each_segment_picks_rows_of_its_own_matrix() -> None:
    matrices = [torch.randn(VOCAB, 3), torch.randn(VOCAB, 5)]
    ids = torch.tensor([4, 0, 10, 4, 1])
    first, second = lora_gather(token_ids=ids, weights=matrices, segments=[(0, 2), (3, 5)])
    assert torch.equal(first, torch.stack([matrices[0][4], matrices[0][0]]))
    assert torch.equal(second, torch.stack([matrices[1][4], matrices[1][1]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference_and_makes_an_odd_rank_even(pool: Pool, dtype: torch.dtype) -> None:
    matrices = [torch.randn(VOCAB, rank).to(dtype) for rank in (3, 4)]
    spans = [(0, 20), (20, 21), (23, 26)]
    # The adapter in between has none of its own: what lies there stays.
    pairs = [(matrices[0].T, torch.zeros(1, 3, dtype=dtype)), None, (matrices[1].T, torch.zeros(1, 4, dtype=dtype))]
    segments = Segments([([pair], *span) for pair, span in zip(pairs, spans, strict=True)], embeds=True)
    ids = torch.randint(0, VOCAB, (28,))
    out = torch.full((28, STRIDE), 7.0).to(dtype)
    pool.call("lora_gather", dtype, len(spans), (ids, segments.tensor, out), (0, STRIDE))
    expected = torch.full((28, STRIDE), 7.0).to(dtype)
    for matrix, (start, end) in ((matrices[0], spans[0]), (matrices[1], spans[2])):
        width = matrix.shape[1]
        [expected[start:end, :width]] = lora_gather(token_ids=ids, weights=[matrix], segments=[(start, end)])
    if dtype == torch.bfloat16:
        expected[:20, 3] = 0
    assert torch.equal(out, expected)
