from __future__ import annotations

import ctypes

import pytest
import torch

from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights, Columns, Extras
from engine.adapter_tables import ENTRIES
from engine.gpu.tabled_adapter import EXPERTS_ENTRY, NUM_PIECES, TabledAdapter
from tests.adapters.handmade import packed
from tests.engine.gpu.handmade_adapters import HIDDEN, INNER, LAYERS, VOCAB, make_sources, raw, tabled


@pytest.fixture
def sources() -> dict[str, AdapterWeights]:
    return make_sources()


def test_all_of_an_adapter_is_counted(sources: dict[str, AdapterWeights]) -> None:
    """Each matrix begins where the widest load may, and so does each row of B: what lies between is counted."""
    up, ends = 5 * INNER, 3 * (HIDDEN + VOCAB)
    spare = {"plain": up, "own": up, "products": up + ends, "norms": 0}
    for name, source in sources.items():
        between = TabledAdapter.of(source, LAYERS).num_bytes - source.num_bytes - 4 * spare[name]
        assert 0 <= between <= 16 * 20


def test_what_is_page_locked_is_counted_as_torch_does_it_and_little_more_than_the_adapter(
    sources: dict[str, AdapterWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, up to twice as much was taken."""
    locked: list[int] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(1 << (tensor.nbytes - 1).bit_length())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    for source in sources.values():
        locked.clear()
        adapter = TabledAdapter.of(source, LAYERS)
        pinned = adapter.pinned()
        assert pinned.num_bytes == adapter.num_bytes == adapter.host_bytes <= sum(locked)
        assert pinned.host_bytes == sum(locked) <= 1.125 * adapter.num_bytes
        assert len(locked) <= NUM_PIECES
        assert len(set(locked[:-1])) == 1


@pytest.mark.parametrize("page_bytes", [0, 1 << 12, 1 << 14])
def test_pieces_of_page_locked_memory_end_where_pages_do_not(
    sources: dict[str, AdapterWeights], monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    for source in sources.values():
        adapter = TabledAdapter.of(source, LAYERS, page_bytes=page_bytes)
        pages, others = (
            [torch.zeros(page_bytes, dtype=torch.uint8) for _ in range(adapter.num_pages)] for _ in range(2)
        )
        there = adapter.pinned().to(torch.device("cpu"), pages)
        known = adapter.to(torch.device("cpu"), others)
        assert torch.equal(there.flat, known.flat)
        assert all(torch.equal(page, other) for page, other in zip(pages, others, strict=True))
        assert there.extras.columns.keys() == known.extras.columns.keys()
        assert there.changes_whole_model == source.changes_whole_model


def test_no_part_lies_in_two_pages_and_one_that_is_longer_keeps_the_adapter_out_of_them(
    sources: dict[str, AdapterWeights],
) -> None:
    largest = VOCAB * HIDDEN * 4
    for name, source in sources.items():
        laid_out = TabledAdapter.of(source, LAYERS, page_bytes=largest)
        assert laid_out.num_pages == -(-laid_out.num_bytes // largest) > (name == "own")
        assert laid_out.num_bytes >= TabledAdapter.of(source, LAYERS).num_bytes
    assert TabledAdapter.of(sources["own"], LAYERS, page_bytes=largest - 16).num_pages == 0
    assert TabledAdapter.of(sources["own"], LAYERS).num_pages == 0
    assert TabledAdapter.of(sources["own"], LAYERS, page_bytes=largest).num_pages == 3


def test_small_parts_fill_what_large_ones_leave_of_their_pages() -> None:
    """In the order in which they come, an adapter of rank 64 for 8 billion parameters took 40% more than without."""
    large, small = raw(4, 48, 32), raw(1, 16, 16)
    raws = {(layer, name): part for layer in (0, 1) for name, part in (("up_proj", large), ("o_proj", small))}
    source = packed(raws, torch.float16)
    # Rows of B are whole loads: the large one is three quarters of a page, and each of the others at most a quarter.
    paged, plain = TabledAdapter.of(source, LAYERS, page_bytes=1024), TabledAdapter.of(source, LAYERS)
    assert plain.num_bytes <= 3 * 1024
    assert paged.num_pages == 3


def test_halves_of_wider_numbers_are_not_taken_for_numbers() -> None:
    """The lower half of 1.00034, as float16, is NaN."""
    gain = torch.full((HIDDEN,), 0x3F807E00, dtype=torch.int32).view(torch.float32)
    assert gain.view(torch.float16).isnan().any()
    for shift, is_finite in ((0.0, True), (torch.inf, False)):
        columns = {(WHOLE_MODEL, "norm"): Columns(gain=gain, shift=torch.full((HIDDEN,), shift))}
        source = packed({(0, "q_proj"): raw(2, HIDDEN, HIDDEN)}, torch.float16, Extras(columns=columns))
        assert TabledAdapter.of(source, LAYERS).is_finite() == is_finite


def test_a_classifier_stays_on_the_host(sources: dict[str, AdapterWeights]) -> None:
    head = torch.randn(3, HIDDEN)
    for name in ("plain", "norms"):
        plain = sources[name]
        columns = plain.extras.columns
        scored = packed({}, torch.float32, Extras(columns=columns, head=head))
        laid_out = TabledAdapter.of(scored, LAYERS)
        without = TabledAdapter.of(packed({}, torch.float32, Extras(columns=columns)), LAYERS)
        assert laid_out.num_bytes == without.num_bytes
        assert laid_out.host_bytes == without.host_bytes + head.nbytes
        assert torch.equal(laid_out.flat, without.flat)
        assert tabled({"scored": scored})["scored"].extras.head is head
        assert not TabledAdapter.of(packed({}, torch.float32, Extras(head=head * torch.inf)), LAYERS).is_finite()


def test_states_that_leave_the_engine_can_be_normed(sources: dict[str, AdapterWeights]) -> None:
    known = sources["norms"].extras.columns[(WHOLE_MODEL, "norm")]
    found = tabled(sources)["norms"].extras.columns[(WHOLE_MODEL, "norm")]
    assert torch.equal(found.gain.cpu(), known.gain)
    assert torch.equal(found.shift.cpu(), known.shift)


def test_what_an_adapter_has_of_experts_stands_behind_the_rest() -> None:
    """In one buffer, and in pages as long as two of its parts."""
    raws = {
        (0, "q_proj"): raw(2, HIDDEN, HIDDEN),
        (1, "experts.2.gate_up_proj"): raw(3, 2 * INNER, HIDDEN),
        (1, "experts.0.up_proj"): raw(1, INNER, HIDDEN),
        (0, "experts.1.down_proj"): raw(8, HIDDEN, INNER),
    }
    source = packed(raws, torch.float32)
    for page_bytes in (0, 4096):
        adapter = TabledAdapter.of(source, LAYERS, page_bytes=page_bytes, num_experts=3)
        assert adapter.has_experts
        pages = [torch.empty(page_bytes, dtype=torch.uint8) for _ in range(adapter.num_pages)]
        there = adapter.to(torch.device("cpu"), pages)
        assert there.has_experts
        before = int(there.table[EXPERTS_ENTRY, 0])
        assert before == (LAYERS + 1) * len(ENTRIES)
        experts = there.table[before:].view(LAYERS, 3, 3, 4)
        for (layer, module), place in zip(list(raws)[1:], ((2, 0), (0, 1), (1, 2)), strict=True):
            a, b, rank, outputs = experts[layer, *place].tolist()
            item = raws[layer, module]
            assert (rank, outputs) == (item.a.shape[0], item.b.shape[0])
            assert torch.equal(numbers_at(a, item.a.numel()).view(item.a.shape), item.a)
            rows = numbers_at(b, outputs * (rank + -rank % 8)).view(outputs, -1)[:, :rank]
            torch.testing.assert_close(rows, item.b * item.scaling)
        assert int(experts[..., 2].count_nonzero()) == 3
    plain = TabledAdapter.of(packed({(0, "q_proj"): raw(2, HIDDEN, HIDDEN)}, torch.float32), LAYERS, num_experts=3)
    assert not plain.has_experts
    assert len(plain.table) == (LAYERS + 1) * len(ENTRIES)
    assert int(plain.table[EXPERTS_ENTRY, 0]) == 0


def numbers_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
