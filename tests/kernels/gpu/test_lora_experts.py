"""What adapters have of experts, against the reference in float64: any choice, any adapters, in tiles of any height."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.experts import routing as expert_routing
from kernels.lora_experts import launch
from kernels.lora_experts.reference import Matrices, lora_experts
from kernels.lora_shrink.launch import Tiles, cut, whole_rows
from tests.kernels.gpu.conftest import DEVICE, DTYPES, assert_near, randn

MAX_RANK, ENTRY = 40, 2


class Adapter:
    """What one adapter has for each expert of the second of two layers, some of it left out, and its table."""

    def __init__(self, draw: random.Random, experts: int, depth: int, width: int, dtype: torch.dtype, *, down: bool):
        kinds = {"none": [], "all": [(2 if down else 0, width, 0)]}
        if not down:
            kinds |= {"gate": [(0, width // 2, 0)], "up": [(1, width // 2, width // 2)]}
            kinds["both"] = kinds["gate"] + kinds["up"]
        before = ENTRY + 3
        table = torch.zeros(before + 2 * experts * 3, 4, dtype=torch.int64)
        table[ENTRY, 0] = before
        self.kept: list[torch.Tensor] = []
        self.matrices: list[Matrices] = []
        for expert in range(experts):
            own = []
            for product, out, column in kinds[draw.choice(sorted(kinds))]:
                rank = draw.randint(1, MAX_RANK)
                a, b = randn(rank, depth, dtype=dtype) / depth**0.5, randn(out, rank, dtype=dtype) / rank**0.5
                rows = whole_rows(b)
                self.kept += [a, rows]
                at = before + (experts + expert) * 3 + product
                table[at] = torch.tensor([a.data_ptr(), rows.data_ptr(), rank, out])
                own.append((a, b, column))
            self.matrices.append(own)
        self.table = table.to(DEVICE)


def routed(
    rows: int, experts: int, chosen: int, height: int, *, decodes: torch.Tensor | None = None
) -> expert_routing.Routing:
    counts = expert_routing.counters(experts, DEVICE)
    logits = randn(rows, experts, dtype=torch.float32)
    return expert_routing.choose_experts(logits, chosen, counts, is_normed=True, tile=height, decodes=decodes)


def change(
    x: torch.Tensor, y: torch.Tensor, routing: expert_routing.Routing, tables: torch.Tensor, height: int, *, down: bool
) -> None:
    entry = len(routing.slots if routing.slots is not None else ()) * 3 + (2 if down else 0)
    products = 1 if down else 2
    shrunk = launch.expert_shrink(x, routing, tables, entry=entry, products=products, max_rank=MAX_RANK, height=height)
    launch.expert_expand(y, shrunk, routing, tables, entry=entry, height=height)


def check(
    lengths: list[int],
    experts: int,
    chosen: int,
    depth: int,
    width: int,
    dtype: torch.dtype,
    *,
    height: int = 16,
    down: bool = False,
    seed: int = 0,
) -> None:
    draw, gap = random.Random(seed), 2
    rows = sum(lengths) + gap * len(lengths)
    segments, adapters, tiles, at = [], [], [], gap
    for number, length in enumerate(lengths):
        segments.append((at, at + length))
        adapters.append(Adapter(draw, experts, depth, width, dtype, down=down))
        if number == 1:
            # One that has nothing of experts.
            adapters[-1].table[ENTRY] = 0
            adapters[-1].matrices = [[]] * experts
        tiles += [[*span, adapters[-1].table.data_ptr()] for span in cut(at, at + length)]
        at += length + gap
    tables = torch.full((rows,), 7, dtype=torch.int64, device=DEVICE)
    where = torch.tensor([*tiles, [0, 0, 0]], device=DEVICE)
    count = torch.tensor([len(tiles)], device=DEVICE)
    launch.fill_row_tables(tables, Tiles(numbers=where, count=count, most=len(where)), entry=ENTRY)
    routing = routed(rows, experts, chosen, height)
    pairs = rows * chosen
    x, y = randn(pairs if down else rows, depth, dtype=dtype), randn(pairs, width, dtype=dtype)
    expected = y.double()
    change(x, y, routing, tables, height, down=down)
    names = routing.experts.flatten()
    for expert in range(experts):
        mine = torch.where(names == expert)[0]
        inputs, outputs = x[mine if down else mine // chosen].double(), expected[mine]
        weights = [[(a.double(), b.double(), column) for a, b, column in own.matrices[expert]] for own in adapters]
        lora_experts(
            x=inputs.cpu(),
            y=(changed := outputs.cpu()),
            rows=(mine // chosen).cpu(),
            segments=segments,
            weights=[[(a.cpu(), b.cpu(), column) for a, b, column in own] for own in weights],
        )
        expected[mine] = changed.to(DEVICE)
    assert_near(y, expected)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 3),
    depth=st.integers(1, 90),
    half=st.integers(1, 70),
    height=st.sampled_from([16, 32]),
    down=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_pair_gets_what_its_adapter_has_of_its_expert(
    lengths: list[int], experts: int, chosen: int, depth: int, half: int, height: int, down: bool, seed: int
) -> None:
    """Gaps between segments, an adapter without experts, experts without rows, several adapters in one tile."""
    check(lengths, experts, min(chosen, experts), depth, 2 * half, torch.float32, height=height, down=down, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [16, 64, 128])
def test_types_and_heights(dtype: torch.dtype, height: int) -> None:
    check([1, 5, 40, 1], 3, 2, 200, 192, dtype, height=height)
    check([1, 5, 40, 1], 3, 2, 96, 200, dtype, height=height, down=True)


def test_rows_of_no_tile_are_left_alone() -> None:
    """Those that fill a recorded step up, and all where no adapter is there."""
    routing = routed(9, 4, 2, 16, decodes=torch.tensor([[i, 0, int(i < 6), 0] for i in range(9)], device=DEVICE))
    adapter = Adapter(random.Random(1), 4, 32, 48, torch.float32, down=False)
    x, y = randn(9, 32, dtype=torch.float32), randn(18, 48, dtype=torch.float32)
    before, tables = y.clone(), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    change(x, y, routing, tables, 16, down=False)
    assert torch.equal(y, before)
    tables += adapter.table.data_ptr() + 32 * (ENTRY + 3)
    change(x, y, routing, tables, 16, down=False)
    assert torch.equal(y[12:], before[12:])
    assert not torch.equal(y[:12], before[:12])


def test_a_row_does_not_depend_on_its_company() -> None:
    """Bitwise on a GPU: whoever else is in its tile, and in what order they came there.

    Interpreted, products are numpy's, which on some processors sums by where in a matrix a row lies.
    """
    adapter = Adapter(random.Random(2), 3, 64, 96, torch.float32, down=False)
    other = Adapter(random.Random(3), 3, 64, 96, torch.float32, down=False)
    counts, found = expert_routing.counters(3, DEVICE), []
    x, logits = randn(20, 64, dtype=torch.float32), randn(20, 3, dtype=torch.float32)
    before = 32 * (ENTRY + 3)
    for order in (torch.arange(20), torch.arange(20).flip(0)):
        routing = expert_routing.choose_experts(logits[order], 2, counts, is_normed=True, tile=16)
        own = [(adapter if row % 3 else other).table.data_ptr() + before for row in order.tolist()]
        y = torch.zeros(40, 96, device=DEVICE)
        change(x[order].contiguous(), y, routing, torch.tensor(own, device=DEVICE), 16, down=False)
        found.append(y.view(20, 2, 96)[order])
    allowed = 0.0 if torch.cuda.is_available() else 1e-5
    torch.testing.assert_close(*found, atol=allowed, rtol=allowed)
