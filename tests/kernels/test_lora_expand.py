from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.lora_expand.reference import lora_expand
from kernels.lora_shrink.reference import lora_shrink
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near
from tests.kernels.native_lora import Segments


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


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4) | st.lists(st.integers(1, 2), min_size=8, max_size=12),
    ranks=st.lists(st.integers(0, 36), min_size=6, max_size=6),
    changes=st.lists(st.booleans(), min_size=5, max_size=5),
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    are_logits=st.booleans(),
)
def test_the_kernel_is_the_reference(
    pool: Pool,
    lengths: list[int],
    ranks: list[int],
    changes: list[bool],
    widths: list[int],
    dtype: torch.dtype,
    are_logits: bool,
) -> None:
    """Several modules side by side, with gaps between the segments; columns change with a product or without."""
    gap, max_rank, modules = 2, 36, len(widths)
    tokens = sum(lengths) + gap * len(lengths)
    shrunk, y = torch.randn(tokens, modules, max_rank).to(dtype), torch.randn(tokens, sum(widths))
    y = y if are_logits else y.to(dtype)
    expected = y.double()
    adapters, columns, at = [], [], 0
    for number, length in enumerate(lengths):
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        columns.append([])
        column = 0
        for module, width in enumerate(widths):
            rank = ranks[(number + module) % len(ranks)]
            changed = changes[(number + module) % len(changes)]
            gain_and_shift = (torch.randn(width), torch.randn(width)) if changed else None
            columns[-1].append(gain_and_shift)
            if gain_and_shift is not None:
                part = expected[at : at + length, column : column + width]
                part.mul_(gain_and_shift[0]).add_(gain_and_shift[1])
            b = torch.randn(width, rank).to(dtype)
            pairs.append((torch.empty(rank, 1, dtype=dtype), b) if rank else None)
            # What makes an odd rank even comes as a zero from the shrink.
            if rank % 2:
                shrunk[at : at + length, module, rank] = 0
            if rank:
                part = shrunk[at : at + length, module, :rank].double()
                lora_expand(
                    y=expected, shrunk=[part], weights=[b.double()], segments=[(at, at + length)], column=column
                )
            column += width
        adapters.append((pairs, at, at + length))
        at += length + gap
    before = y.clone()
    segments = Segments(adapters, columns)
    sizes = (sum(widths), 0, modules, max_rank, *widths)
    pool.call("lora_logits" if are_logits else "lora_expand", dtype, len(adapters), (shrunk, segments.tensor, y), sizes)
    assert_near(y, expected)
    for _, _, end in adapters:
        assert torch.equal(y[end : end + gap], before[end : end + gap])
