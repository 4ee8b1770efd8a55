"""What adapters add to experts' products, held against a formula and by the kernel against the reference."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.experts.reference import sort_by_expert
from kernels.lora_experts.reference import Matrices, lora_experts
from kernels.packed_linear.reference import to_panels
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near

NUMBERS = 4
"""Of an entry: addresses of A and B, rank, outputs."""


def test_each_row_meets_what_its_own_adapter_has() -> None:
    torch.manual_seed(0)
    rows = torch.tensor([0, 2, 3, 7, 8])
    x, y = torch.randn(5, 6), torch.randn(5, 8)
    first, second = (torch.randn(3, 6), torch.randn(8, 3)), (torch.randn(1, 6), torch.randn(4, 1))
    weights: list[Matrices] = [[(*first, 0)], [(*second, 4), (*second, 0)], []]
    found = y.clone()
    lora_experts(x=x, y=found, rows=rows, segments=[(1, 3), (3, 8), (8, 9)], weights=weights)
    torch.testing.assert_close(found[0], y[0])
    torch.testing.assert_close(found[1], y[1] + first[1] @ (first[0] @ x[1]))
    for row in (2, 3):
        added = second[1] @ (second[0] @ x[row])
        torch.testing.assert_close(found[row], y[row] + torch.cat((added, added)))
    torch.testing.assert_close(found[4], y[4])


class Adapter:
    """What one adapter has for each expert of a layer, some of it left out, and its table."""

    def __init__(self, draw: random.Random, experts: int, sizes: tuple[int, int], dtype: torch.dtype, *, down: bool):
        depth, width = sizes
        self.matrices: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        self._kept: list[torch.Tensor] = []
        # Another layer's come before.
        self.table = torch.zeros(2, experts, 3, NUMBERS, dtype=torch.int64)
        for expert in range(experts):
            kinds = {"none": [], "all": [(2 if down else 0, width, 0)]}
            if not down:
                kinds |= {"gate": [(0, width // 2, 0)], "up": [(1, width // 2, width // 2)]}
                kinds["both"] = kinds["gate"] + kinds["up"]
            own = []
            for product, out, column in kinds[draw.choice(sorted(kinds))]:
                rank = draw.randint(1, 20)
                a, b = torch.randn(rank, depth).to(dtype), torch.randn(out, rank).to(dtype)
                panels = to_panels(b)
                self._kept += [a, panels]
                entry = torch.tensor([a.data_ptr(), panels.data_ptr(), rank, out])
                self.table[1, expert, product] = entry
                own.append((a, b, column))
            self.matrices.append(own)


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6) | st.lists(st.integers(1, 60), min_size=1, max_size=3),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 3),
    depth=st.integers(1, 70),
    half=st.integers(1, 300),
    down=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_the_kernels_are_the_reference(
    pool: Pool,
    lengths: list[int],
    experts: int,
    chosen: int,
    depth: int,
    half: int,
    down: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Rows with and without adapters, experts without rows, adapters that have something for some experts only."""
    draw, chosen, width, gap = random.Random(seed), min(chosen, experts), 2 * half, 2
    torch.manual_seed(seed)
    num_rows = sum(lengths) + gap * len(lengths)
    names = torch.stack([torch.randperm(experts)[:chosen] for _ in range(num_rows)]).to(torch.int32)
    rows, _, groups = sort_by_expert(names, experts)
    num_pairs = len(rows)
    x = torch.randn(num_pairs if down else num_rows, depth).to(dtype)
    y = torch.randn(num_pairs + 1, width).to(dtype)
    segments, adapters, at = [], [], 0
    for length in lengths:
        segments.append((at, at + length))
        adapters.append(Adapter(draw, experts, (depth, width), dtype, down=down))
        at += length + gap
    spans = torch.tensor([(*span, own.table.data_ptr()) for span, own in zip(segments, adapters, strict=True)])
    products = 1 if down else 2
    between = (rows, groups, spans, torch.tensor([num_pairs]))
    shrunk, found = torch.full((num_pairs, products, 20), torch.nan, dtype=dtype), y.clone()
    sizes = (experts * 3 + (2 if down else 0), products, 20)
    pool.call("expert_shrink", dtype, len(lengths), (x, *between, shrunk), (depth, *sizes, down))
    pool.call("expert_expand", dtype, len(lengths), (shrunk, *between, found), (width, *sizes))
    expected = y.double()
    inputs = x if down else x[rows]
    for expert, begin, count in groups.tolist():
        pairs = slice(begin, begin + count)
        weights = [[(a.double(), b.double(), column) for a, b, column in own.matrices[expert]] for own in adapters]
        lora_experts(x=inputs[pairs].double(), y=expected[pairs], rows=rows[pairs], segments=segments, weights=weights)
    assert_near(found, expected)
    assert torch.equal(found[-1], y[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(pool: Pool, dtype: torch.dtype) -> None:
    """Bitwise: whatever its neighbours choose, and in whatever block it comes to lie."""
    torch.manual_seed(3)
    adapter = Adapter(random.Random(3), 4, (64, 96), dtype, down=False)
    x, alone = torch.randn(200, 64).to(dtype), []
    for count in (1, 200):
        names = torch.full((count, 1), 2, dtype=torch.int32)
        if count > 1:
            names[1::2] = torch.randint(0, 4, (100, 1), dtype=torch.int32)
        rows, places, groups = sort_by_expert(names, 4)
        between = (rows, groups, torch.tensor([(0, count, adapter.table.data_ptr())]), torch.tensor([count]))
        shrunk, y = torch.zeros(count, 2, 20, dtype=dtype), torch.zeros(count, 96, dtype=dtype)
        pool.call("expert_shrink", dtype, 1, (x, *between, shrunk), (64, 12, 2, 20, False))
        pool.call("expert_expand", dtype, 1, (shrunk, *between, y), (96, 12, 2, 20))
        alone.append(y[places[0, 0]])
    assert torch.equal(*alone)
