from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from kernels.lora_shrink.reference import lora_shrink
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near
from tests.kernels.native_lora import Segments


def test_each_segment_is_multiplied_by_its_own_matrix_at_its_own_rank() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 5)
    weights = [torch.randn(rank, 5) for rank in (1, 4, 7)]
    shrunk = lora_shrink(x=x, weights=weights, segments=[(0, 3), (3, 3), (6, 9)])
    assert [tuple(part.shape) for part in shrunk] == [(3, 1), (0, 4), (3, 7)]
    for token in range(3):
        torch.testing.assert_close(shrunk[0][token], weights[0] @ x[token])
        torch.testing.assert_close(shrunk[2][token], weights[2] @ x[6 + token])


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4) | st.lists(st.integers(1, 2), min_size=8, max_size=12),
    ranks=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    width=st.integers(1, 150),
    modules=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_the_kernel_is_the_reference(
    pool: Pool, lengths: list[int], ranks: list[int], width: int, modules: int, dtype: torch.dtype
) -> None:
    """Several modules at once, with gaps between the segments; the first entry of each table belongs to others."""
    gap, max_rank = 2, 20
    tokens = sum(lengths) + gap * len(lengths)
    x = torch.randn(tokens, width).to(dtype)
    found = torch.full((tokens, modules, max_rank), 7.0, dtype=dtype)
    adapters, at = [], 0
    for number, length in enumerate(lengths):
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]
        for module in range(modules):
            rank = ranks[(number + module) % len(ranks)]
            pairs.append((torch.randn(rank, width).to(dtype), torch.randn(4, rank).to(dtype)) if rank else None)
        adapters.append((pairs, at, at + length))
        at += length + gap
    segments = Segments(adapters)
    pool.call(
        "lora_shrink", dtype, len(adapters), (x, segments.tensor, found), (width, 1, modules, max_rank, *[4] * modules)
    )
    for pairs, start, end in adapters:
        for module, pair in enumerate(pairs[1:]):
            if pair is not None:
                [expected] = lora_shrink(x=x.double(), weights=[pair[0].double()], segments=[(start, end)])
                assert_near(found[start:end, module, : pair[0].shape[0]], expected)
        assert found[end : end + gap].eq(7).all()
