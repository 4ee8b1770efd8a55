"""Against the references in float64, shrink and expand together: gaps, ranks that differ, modules that are missing."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.lora_expand import kernel as expand_kernel
from kernels.lora_expand import launch as expand_launch
from kernels.lora_expand.launch import lora_expand
from kernels.lora_gather.launch import lora_gather
from kernels.lora_logits.launch import lora_logits
from kernels.lora_shrink import kernel as shrink_kernel
from kernels.lora_shrink import launch as shrink_launch
from kernels.lora_shrink.launch import Tiles, cut, lora_shrink, whole_rows
from tests.kernels.gpu.conftest import DEVICE, DTYPES, TOLERANCE, assert_near, randn
from tests.kernels.gpu.held_up import Before

MAX_RANK = 128


def tiles_of(numbers: list[list[int]], num_spare: int = 0) -> Tiles:
    """Tiles, and room for more, for which programs are launched, too."""
    count, numbers = torch.tensor([len(numbers)], device=DEVICE), numbers + [[0, 0, 0]] * num_spare
    return Tiles(numbers=torch.tensor(numbers, device=DEVICE), count=count, most=len(numbers))


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
    kept, numbers, at = [], [], gap
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
            rows = whole_rows(b)
            if rank:
                table[entry + module, :3] = torch.tensor([a.data_ptr(), rows.data_ptr(), rank])
                shrunk = (x[at : at + length].double() @ a.double().T).to(dtype).double()
                part += shrunk @ b.double().T
            kept += [a, rows]
            column += width
        table = table.to(DEVICE)
        kept.append(table)
        numbers += [[*span, table.data_ptr()] for span in cut(at, at + length)]
        at += length + gap
    tiles = tiles_of(numbers, num_spare)
    found = lora_shrink(x, tiles, entry=entry, num_modules=len(widths), max_rank=MAX_RANK)
    lora_expand(y, found, tiles, entry=entry, splits=widths)
    assert_near(y, expected)


def test_columns_of_a_wider_tensor_get_theirs_and_no_others() -> None:
    """What norms all heads of queries, or of keys, together changes where it lies."""
    y, columns = randn(9, 80, dtype=torch.float32), randn(2, 48, dtype=torch.float32)
    table = torch.zeros(1, 4, dtype=torch.int64)
    table[0, 3] = columns.data_ptr()
    table = table.to(DEVICE)
    tiles, expected = tiles_of([[*span, table.data_ptr()] for span in cut(2, 7)]), y.double()
    expected[2:7, 16:64] = expected[2:7, 16:64] * columns[0].double() + columns[1].double()
    nothing = torch.empty(1, 9, 1, MAX_RANK, dtype=torch.float32, device=DEVICE)
    lora_expand(y[:, 16:64], nothing, tiles, entry=0, splits=[48])
    assert_near(y, expected)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    ranks=st.lists(st.integers(0, 40), min_size=3, max_size=5),
    widths=st.lists(st.sampled_from([16, 48, 144]), min_size=1, max_size=3),
    splits=st.sampled_from([1, 4]),
    has_columns=st.booleans(),
)
def test_every_segment_gets_its_own_products_and_columns(
    lengths: list[int], ranks: list[int], widths: list[int], splits: int, has_columns: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrink_launch, "BLOCK_K", 128)
        patch.setattr(shrink_launch, "num_splits", lambda *_: splits)
        check(lengths, ranks, widths, 200, torch.float32, has_columns=has_columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [8, 16, 64, 128])
def test_ranks_and_types(dtype: torch.dtype, rank: int) -> None:
    check([1, 1, 5, 30], [rank], [128, 64, 64], 256, dtype, has_columns=rank == 8)


def test_a_step_without_tiles_changes_nothing() -> None:
    x, y = randn(4, 32, dtype=torch.float32), randn(4, 16, dtype=torch.float32)
    before = y.clone()
    tiles = tiles_of([], num_spare=3)
    found = lora_shrink(x, tiles, entry=0, num_modules=1, max_rank=8)
    lora_expand(y, found, tiles, entry=0, splits=[16])
    assert torch.equal(y, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="programs are held up where they are interpreted")
def test_what_the_kernel_before_writes_is_read_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Before()
    for kernel in (shrink_kernel, expand_kernel):
        monkeypatch.setattr(kernel, "let_begin", before.let_begin)
        monkeypatch.setattr(kernel, "wait", before.wait)

    def shrink(x: torch.Tensor, tiles: Tiles, **options: Any) -> torch.Tensor:
        with before.writes(x):
            return shrink_launch.lora_shrink(x, tiles, **options)

    def expand(y: torch.Tensor, shrunk: torch.Tensor, tiles: Tiles, **options: Any) -> None:
        with before.writes(y, shrunk):
            expand_launch.lora_expand(y, shrunk, tiles, **options)

    monkeypatch.setitem(check.__globals__, "lora_shrink", shrink)
    monkeypatch.setitem(check.__globals__, "lora_expand", expand)
    check([1, 1, 1, 20], [0, 4, 20], [48, 48], 80, torch.float32, has_columns=True)


SPANS = ((1, 2), (2, 25), (27, 30))
"""Of three adapters; rows beside and between belong to the base."""
NUM_ROWS, VOCAB = 32, 150


def tables(entries: list[dict[int, tuple[torch.Tensor | None, torch.Tensor | None, int]]]) -> list[torch.Tensor]:
    """Make the table of each adapter: by entry, A, B and the rank."""
    made = []
    for adapter in entries:
        table = torch.zeros(4, 4, dtype=torch.int64)
        for entry, (a, b, rank) in adapter.items():
            table[entry, :3] = torch.tensor([0 if t is None else t.data_ptr() for t in (a, b)] + [rank])
        made.append(table.to(DEVICE))
    return made


def tiles_by(made: list[torch.Tensor]) -> Tiles:
    spans = zip(SPANS, made, strict=True)
    return tiles_of([[*span, table.data_ptr()] for ends, table in spans for span in cut(*ends)], num_spare=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 200])
def test_embedded_tokens_get_rows_of_own_matrices_and_of_products(dtype: torch.dtype, width: int) -> None:
    own, a, b = (randn(*shape, dtype=dtype) for shape in ((VOCAB, width), (VOCAB, 21), (width, 21)))
    rows_of_a, rows_of_b = whole_rows(a), whole_rows(b)
    columns = randn(2, width, dtype=torch.float32)
    made = tables([{1: (own, None, width)}, {2: (rows_of_a, rows_of_b, 21)}, {2: (rows_of_a, rows_of_b, 21)}])
    made[2][2, 3] = columns.data_ptr()
    ids, x = torch.randint(0, VOCAB, (NUM_ROWS,), device=DEVICE), randn(NUM_ROWS, width, dtype=dtype)
    expected = x.double()
    expected[1:2] = own[ids[1:2]].double()
    expected[27:30] = expected[27:30] * columns[0].double() + columns[1].double()
    for start, end in SPANS[1:]:
        expected[start:end] += a[ids[start:end]].double() @ b.double().T
    untouched = [0, 25, 26, 30, 31]
    before = x[untouched].clone()
    lora_gather(ids, x, tiles_by(made), own=1, entry=2)
    assert_near(x, expected)
    assert torch.equal(x[untouched], before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 200])
def test_logits_come_from_own_matrices_and_get_products(dtype: torch.dtype, depth: int) -> None:
    """Logits are float32, whatever the matrices are."""
    own, a, b = (randn(*shape, dtype=dtype) / 8 for shape in ((VOCAB, depth), (21, depth), (VOCAB, 21)))
    rows = whole_rows(b)
    made = tables([{1: (a, rows, 21)}, {0: (None, own, depth)}, {0: (None, own, depth), 1: (a, rows, 21)}])
    h, logits = randn(NUM_ROWS, depth, dtype=dtype), randn(NUM_ROWS, VOCAB, dtype=torch.float32)
    expected = logits.double()
    for start, end in SPANS[1:]:
        expected[start:end] = h[start:end].double() @ own.double().T
    for start, end in (SPANS[0], SPANS[2]):
        shrunk = (h[start:end].double() @ a.double().T).to(dtype).double()
        expected[start:end] += shrunk @ b.double().T
    untouched = [0, 25, 26, 30, 31]
    before = logits[untouched].clone()
    tiles = tiles_by(made)
    lora_logits(h, logits, tiles, entry=0)
    found = lora_shrink(h, tiles, entry=1, num_modules=1, max_rank=MAX_RANK)
    lora_expand(logits, found, tiles, entry=1, splits=[VOCAB], dtype=dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(logits.double(), expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)
    assert torch.equal(logits[untouched], before)
