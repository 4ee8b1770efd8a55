"""Shrink and expand together, against the reference in float64: gaps, ranks that differ, modules that are missing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.lora_expand.launch import lora_expand
from kernels.lora_shrink import launch as shrink_launch
from kernels.lora_shrink.launch import lora_shrink
from tests.kernels.gpu.conftest import DEVICE, DTYPES, assert_near, randn

MAX_RANK = 64


def check(
    lengths: list[int],
    ranks: list[int],
    widths: list[int],
    depth: int,
    dtype: torch.dtype,
    *,
    num_spare: int = 2,
    has_columns: bool = False,
) -> None:
    gap, entry = 2, 3
    tokens = sum(lengths) + gap * len(lengths)
    x, y = randn(tokens, depth, dtype=dtype), randn(tokens, sum(widths), dtype=dtype)
    expected = y.double()
    kept, segments, at = [], [], gap
    for number, length in enumerate(lengths):
        table = torch.zeros(entry + len(widths), 4, dtype=torch.int64)
        column = 0
        for module, width in enumerate(widths):
            rank = ranks[(number + module) % len(ranks)]
            a, b = randn(rank, depth, dtype=dtype) / depth**0.5, randn(width, rank, dtype=dtype)
            part = expected[at : at + length, column : column + width]
            if has_columns and (number + module) % 2:
                columns = randn(2, width, dtype=torch.float32)
                table[entry + module, 3] = columns.data_ptr()
                part.copy_(part * columns[0].double() + columns[1].double())
                kept.append(columns)
            if rank:
                table[entry + module, :3] = torch.tensor([a.data_ptr(), b.data_ptr(), rank])
                shrunk = (x[at : at + length].double() @ a.double().T).to(dtype).double()
                part += shrunk @ b.double().T
            kept += [a, b]
            column += width
        table = table.to(DEVICE)
        kept.append(table)
        segments.append([at, min(at + length, tokens), table.data_ptr()])
        at += length + gap
    segments += [[0, 0, 0]] * num_spare
    where, count = torch.tensor(segments, device=DEVICE), torch.tensor([len(lengths)], device=DEVICE)
    options = {"entry": entry, "max_segments": len(segments)}
    found = lora_shrink(x, where, count, num_modules=len(widths), max_rank=MAX_RANK, **options)
    lora_expand(y, found, where, count, splits=widths, **options)
    assert_near(y, expected)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ranks=st.lists(st.integers(0, 40), min_size=3, max_size=5),
    widths=st.lists(st.sampled_from([16, 48, 144]), min_size=1, max_size=3),
    splits=st.sampled_from([1, 4]),
    has_columns=st.booleans(),
)
def test_every_segment_gets_its_own_products_and_columns(
    lengths: list[int], ranks: list[int], widths: list[int], splits: int, has_columns: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrink_launch, "num_splits", lambda *_: splits)
        check(lengths, ranks, widths, 200, torch.float32, has_columns=has_columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_ranks_and_types(dtype: torch.dtype, rank: int) -> None:
    check([1, 1, 5, 30], [rank], [128, 64, 64], 256, dtype, has_columns=rank == 8)


def test_a_step_without_segments_changes_nothing() -> None:
    x, y = randn(4, 32, dtype=torch.float32), randn(4, 16, dtype=torch.float32)
    before = y.clone()
    where, count = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = lora_shrink(x, where, count, entry=0, num_modules=1, max_rank=8, max_segments=3)
    lora_expand(y, found, where, count, entry=0, splits=[16], max_segments=3)
    assert torch.equal(y, before)
