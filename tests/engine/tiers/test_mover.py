"""Blocks go down and come back as they were, on threads; what is overwritten meanwhile does not count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName
from engine.kv_cache import KvCache
from engine.ports import BlockOrder
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.mover import HALVING_S, MAX_SURPRISE, NEW_SHARE, BlockTime, CacheBytes, TierMover, launched
from tests.engine.test_kv_cache import a_cache
from tests.simulated_gpu.device import in_order, simulate

NUM_SLOTS = 8
WAIT_S = 60.0


class Host(HostSlots):
    """One whose writes wait until they may, and fail where they are told to."""

    def __init__(self, block_bytes: int, *, is_pinned: bool) -> None:
        super().__init__(NUM_SLOTS, block_bytes, is_pinned=is_pinned)
        self.may_write = threading.Event()
        self.may_write.set()
        self.fails = False

    def write(self, slot: int, name: BlockName, depth: int, content: torch.Tensor) -> None:
        assert self.may_write.wait(WAIT_S)
        if self.fails:
            raise OSError("full")
        super().write(slot, name, depth, content)

    def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
        return None if self.fails else super().read(slot, name)


class Bench:
    """A mover over one tier, and what it has said."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        device = cache.data.device
        self.host = Host(cache.block_bytes, is_pinned=device.type == "cuda")
        self.arrived = threading.Event()
        self.mover = TierMover(cache, [self.host], device, self.arrived.set)

    def stored(self, count: int) -> list[tuple[BlockOrder, bool]]:
        self.mover._storing[0].submit(lambda: None).result(WAIT_S)
        found = self.mover.stored()
        assert len(found) == count
        return found

    def fetch(self, *orders: BlockOrder) -> int:
        self.arrived.clear()
        self.mover.fetch(7, orders)
        assert self.arrived.wait(WAIT_S)
        ((ticket, num_good),) = self.mover.fetched()
        assert ticket == 7
        return num_good


@pytest.fixture(params=["cpu", "cuda"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "cuda":
        request.getfixturevalue("a_gpu")
    bench = Bench(a_cache(device=request.param))
    yield bench
    bench.host.may_write.set()
    bench.mover.close()


def a_name(number: int) -> BlockName:
    return BlockName(bytes([number]) * 32)


def down(block: int, slot: int) -> BlockOrder:
    return BlockOrder(BlockId(block), a_name(block), 0, 0, slot)


def up(block: int, name: int, slot: int) -> BlockOrder:
    return BlockOrder(BlockId(block), a_name(name), 0, 0, slot)


def test_blocks_go_down_and_come_back(bench: Bench) -> None:
    before = bench.cache.data.clone()
    bench.mover.store([down(1, 0), down(2, 5)])
    assert [was for _, was in bench.stored(2)] == [True, True]
    bench.cache.clear([1, 2])
    assert bench.fetch(up(7, 2, 5), up(1, 1, 0)) == 2
    assert torch.equal(bench.cache.data[:, :, 7], before[:, :, 2])
    assert torch.equal(bench.cache.data[:, :, 1], before[:, :, 1])
    assert bench.mover.fetch_s({0: 10}) > 0


def test_a_block_that_is_given_away_before_it_is_read_is_not_stored(bench: Bench) -> None:
    bench.host.may_write.clear()
    bench.mover.store([down(1, 0)])
    bench.mover.store([down(2, 1), down(3, 2)])
    # The thread waits to write the first; the others have not been read.
    bench.mover.abandon(BlockId(2))
    bench.cache.clear([2])
    bench.host.may_write.set()
    assert [(order.block, was) for order, was in bench.stored(3)] == [(1, True), (2, False), (3, True)]
    # Named anew, it can be stored again.
    bench.mover.store([down(2, 1)])
    assert bench.stored(1)[0][1]


def test_what_cannot_be_written_or_read_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.mover.store([down(1, 0)])
    bench.stored(1)
    assert bench.arrived.is_set()
    bench.host.fails = True
    bench.mover.store([down(2, 1), down(3, 2)])
    assert [was for _, was in bench.stored(2)] == [False, False]
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    before = bench.cache.data.clone()
    assert bench.fetch(up(4, 1, 0)) == 0
    assert torch.equal(bench.cache.data, before)


def test_what_follows_a_block_that_cannot_be_read_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are read at a time; the second is lost, and those behind it are not."""
    cache = a_cache(device="cpu")
    monkeypatch.setattr("engine.tiers.mover.COPIED_AT_ONCE_BYTES", 2 * cache.block_bytes)
    bench = Bench(cache)
    bench.mover.store([down(number, number) for number in range(1, 5)])
    bench.stored(4)
    read = bench.host.read
    monkeypatch.setattr(bench.host, "read", lambda slot, name: None if slot == 2 else read(slot, name))
    before = cache.data.clone()
    assert bench.fetch(up(5, 1, 1), up(6, 2, 2), up(7, 3, 3), up(8, 4, 4)) == 1
    assert torch.equal(cache.data[:, :, 5], before[:, :, 1])
    bench.mover.close()


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What lets time pass, and a fetch of two blocks in which each takes so long."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def pass_s(seconds: float) -> None:
        clock[0] += seconds

    return pass_s


def test_nothing_is_expected_before_the_first_measurement(pass_s: Callable[[float], None]) -> None:
    assert BlockTime().expected_s == 0.0


def test_what_was_measured_is_halved_in_time(pass_s: Callable[[float], None]) -> None:
    block_time = BlockTime()
    block_time.learn(2.0)
    pass_s(HALVING_S)
    assert block_time.expected_s == pytest.approx(1.0)


def test_a_surprise_counts_as_a_few_times_what_was_expected(pass_s: Callable[[float], None]) -> None:
    block_time = BlockTime()
    for block_s in (1.0, 1000.0):
        block_time.learn(block_s)
    assert block_time.expected_s == pytest.approx(1.0 - NEW_SHARE + NEW_SHARE * MAX_SURPRISE)


def fetch_in(bench: Bench, pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, block_s: float) -> None:
    """Fetch two blocks, each of which takes so long."""

    def read(slot: int, name: BlockName) -> torch.Tensor:
        pass_s(block_s)
        return torch.zeros(bench.cache.block_bytes, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(bench.host, "read", read)
        assert bench.fetch(up(4, 1, 0), up(5, 2, 1)) == 2


def test_a_slow_fetch_is_forgotten(
    bench: Bench, pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_in(bench, pass_s, monkeypatch, 2.0)
    assert bench.mover.fetch_s({0: 1}) == pytest.approx(2.0)
    pass_s(100.0)
    assert bench.mover.fetch_s({0: 1}) < 0.01


def test_what_was_forgotten_is_known_again_when_the_disk_is_as_slow_as_it_was(
    bench: Bench, pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a surprise beside the little that was left of what was measured, and counted for no more than that."""
    for _ in range(3):
        fetch_in(bench, pass_s, monkeypatch, 2.0)
        assert bench.mover.fetch_s({0: 1}) == pytest.approx(2.0)
        pass_s(100.0)


def test_a_disk_that_slept_once_is_not_taken_for_slow(
    bench: Bench, pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for block_s in (0.01, 10.0):
        fetch_in(bench, pass_s, monkeypatch, block_s)
    assert bench.mover.fetch_s({0: 1}) <= 0.04
    # And what is fast from then on is known for that.
    for _ in range(8):
        fetch_in(bench, pass_s, monkeypatch, 0.01)
    assert bench.mover.fetch_s({0: 1}) < 0.02


def test_what_was_read_of_a_fetch_that_was_given_up_tells_how_slow_the_disk_is(
    bench: Bench, pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was copied counted, and all of a batch was read, so a slow disk was asked again by each request."""
    read = []

    def read_slowly(slot: int, name: BlockName) -> torch.Tensor:
        read.append(slot)
        pass_s(0.5)
        bench.mover.give_up(7)
        return torch.zeros(bench.cache.block_bytes, dtype=torch.uint8)

    monkeypatch.setattr(bench.host, "read", read_slowly)
    assert bench.fetch(up(4, 1, 0), up(5, 2, 1), up(6, 3, 2)) == 0
    assert read == [0]
    assert bench.mover.fetch_s({0: 4}) == pytest.approx(2.0)


def test_how_slow_a_disk_is_tells_nothing_of_host_memory(
    pass_s: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was one estimate, so after a fetch from disk, host memory was not asked for up to a minute."""
    cache, arrived = a_cache(), threading.Event()
    tiers = [Host(cache.block_bytes, is_pinned=False) for _ in range(2)]
    mover = TierMover(cache, tiers, torch.device("cpu"), arrived.set)

    def reads_in(block_s: float) -> Callable[[int, BlockName], torch.Tensor]:
        def read(slot: int, name: BlockName) -> torch.Tensor:
            pass_s(block_s)
            return torch.zeros(cache.block_bytes, dtype=torch.uint8)

        return read

    for tier, block_s in zip(tiers, (0.001, 1.0), strict=True):
        monkeypatch.setattr(tier, "read", reads_in(block_s))
    mover.fetch(1, [BlockOrder(BlockId(4 + tier), a_name(1), 0, tier, 0) for tier in range(2)])
    assert arrived.wait(WAIT_S)
    mover.close()
    assert mover.fetch_s({0: 10}) == pytest.approx(0.01, rel=0.1)
    assert mover.fetch_s({1: 10}) == pytest.approx(10.0)
    assert mover.fetch_s({0: 10, 1: 1}) == pytest.approx(1.01, rel=0.1)


def test_nothing_is_written_for_a_fetch_that_was_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.mover.store([down(1, 0)])
    bench.stored(1)
    before, may_read = bench.cache.data.clone(), threading.Event()

    def read(slot: int, name: BlockName) -> torch.Tensor:
        assert may_read.wait(WAIT_S)
        return torch.zeros(bench.cache.block_bytes, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(bench.host, "read", read)
        bench.arrived.clear()
        bench.mover.fetch(7, [up(4, 1, 0)])
        bench.mover.give_up(7)
        may_read.set()
        assert bench.arrived.wait(WAIT_S)
        assert bench.mover.fetched() == [(7, 0)]
        assert torch.equal(bench.cache.data, before)
    assert bench.fetch(up(4, 1, 0)) == 1


def test_nothing_is_kept_of_a_fetch_that_was_given_up_when_it_was_done(bench: Bench) -> None:
    bench.mover.store([down(1, 0)])
    bench.stored(1)
    bench.arrived.clear()
    bench.mover.fetch(7, [up(4, 1, 0)])
    assert bench.arrived.wait(WAIT_S)
    bench.mover.give_up(7)
    assert bench.mover.fetched() == [(7, 1)]
    assert not bench.mover._given_up


def test_an_error_on_a_thread_ends_its_copies_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.cache, "read", lambda blocks: 1 / 0)
        patch.setattr(bench.cache, "write", lambda blocks, content: 1 / 0)
        bench.mover.store([down(1, 0)])
        assert not bench.stored(1)[0][1]
        assert bench.fetch(up(4, 1, 0)) == 0
    bench.mover.store([down(1, 0)])
    assert bench.stored(1)[0][1]


def test_both_tiers_are_written_and_each_is_read(tmp_path: Path) -> None:
    cache = a_cache(torch.bfloat16, by_block=True)
    host = HostSlots(NUM_SLOTS, cache.block_bytes, is_pinned=False)
    disk = DiskSlots(tmp_path, "m", "f", num_slots=NUM_SLOTS, block_bytes=cache.block_bytes)
    arrived = threading.Event()
    mover = TierMover(cache, [host, disk], torch.device("cpu"), arrived.set)
    before = cache.data.clone()
    places = [(1, 0, 0), (1, 1, 3), (2, 1, 4)]
    mover.store([BlockOrder(BlockId(block), a_name(block), block - 1, tier, slot) for block, tier, slot in places])
    for thread in mover._storing:
        thread.submit(lambda: None).result(WAIT_S)
    assert [was_written for _, was_written in mover.stored()] == [True, True, True]
    arrived.clear()
    mover.fetch(1, [BlockOrder(BlockId(5), a_name(1), 0, 0, 0), BlockOrder(BlockId(6), a_name(2), 1, 1, 4)])
    assert arrived.wait(WAIT_S)
    assert mover.fetched() == [(1, 2)]
    assert torch.equal(cache.data[:, :, 5:7], before[:, :, 1:3])
    mover.close()
    again = DiskSlots(tmp_path, "m", "f", num_slots=NUM_SLOTS, block_bytes=cache.block_bytes)
    assert [block.slot for block in again.contents()] == [3, 4]


def test_a_disk_that_hangs_does_not_hold_up_what_is_in_host_memory() -> None:
    """One thread copied for both tiers."""
    cache, may_go_on = a_cache(), threading.Event()

    class Hanging(Host):
        def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
            assert may_go_on.wait(WAIT_S)
            return super().read(slot, name)

    tiers = [kind(cache.block_bytes, is_pinned=False) for kind in (Host, Hanging)]
    tiers[1].may_write = may_go_on
    arrived = threading.Event()
    mover = TierMover(cache, tiers, torch.device("cpu"), arrived.set)
    mover.store([BlockOrder(BlockId(1), a_name(1), 0, tier, 0) for tier in (1, 0)])
    assert arrived.wait(WAIT_S)
    assert [(order.tier, was_written) for order, was_written in mover.stored()] == [(0, True)]
    arrived.clear()
    mover.fetch(1, [BlockOrder(BlockId(4), a_name(1), 0, 1, 0)])
    mover.fetch(2, [BlockOrder(BlockId(5), a_name(1), 0, 0, 0)])
    assert arrived.wait(WAIT_S)
    assert mover.fetched() == [(2, 1)]
    may_go_on.set()
    mover.close()


def test_closing_waits_for_one_block_of_a_long_fetch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_read, read = threading.Event(), threading.Event(), []

    def read_slowly(slot: int, name: BlockName) -> torch.Tensor:
        read.append(slot)
        is_reading.set()
        assert may_read.wait(WAIT_S)
        return torch.zeros(bench.cache.block_bytes, dtype=torch.uint8)

    monkeypatch.setattr(bench.host, "read", read_slowly)
    # Who closes waits for the threads.
    monkeypatch.setattr(bench.mover._storing[0], "shutdown", lambda **_: may_read.set())
    bench.mover.fetch(7, [up(4, 1, slot) for slot in range(4)])
    assert is_reading.wait(WAIT_S)
    bench.mover.close()
    assert read == [0]


def test_closing_does_not_wait_for_what_has_not_begun(bench: Bench) -> None:
    for _ in range(100):
        bench.mover.fetch(1, [up(4, 1, 0)])
    bench.mover.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is here is not simulated")
def test_copies_wait_for_what_was_launched_before_their_order_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch of a long fetch waited for all steps launched by then, for one after the other."""
    with in_order():
        gpu, device = simulate(monkeypatch), torch.device("cuda")
        cache = a_cache(device="cuda")
        copies = CacheBytes(cache, device)
        steps = gpu.order.default
        cache.clear([1, 2])
        after, num_before = launched(device), steps.seen[steps.number]
        cache.clear([3])
        content = copies.read([1, 4], after)
        copies.write([2], [content[1]], after)
        assert copies._stream is not None
        assert copies._stream.stream.seen[steps.number] == num_before  # type: ignore[attr-defined]
        assert steps.seen[steps.number] > num_before


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    assert launched(torch.device("cpu")) is None
