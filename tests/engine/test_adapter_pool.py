from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterError
from adapters.identity import AdapterDigest, AdapterRef
from adapters.loading import AdapterLoader
from adapters.registry import reference
from engine.adapter_pool import AdapterPool
from engine.config import ResolvedConfig
from engine.errors import EngineError
from engine.gpu.tabled_adapter import TabledAdapter
from tests.adapters.handmade import SHAPES, make_config, make_tensors, opens, write

WAIT_S = 20.0
BYTES = 2 * 4 * 4 * (16 + 16)
"""Of an adapter: two layers, float32, rank 4, A and B of q_proj."""


def make_resolved(slots: int = 2, host: int = 4) -> ResolvedConfig:
    return ResolvedConfig(
        model_path="m", device="cpu", dtype="float32", num_threads=1, max_model_len=64, max_num_seqs=8,
        max_batched_tokens=64, block_tokens=16, num_blocks=8, enable_prefix_cache=True,
        max_queued_requests=8, max_adapter_rank=16, max_device_adapters=slots,
        max_host_adapter_bytes=host * BYTES,
    )  # fmt: skip


def no_base(name: str) -> torch.Tensor:
    raise AssertionError(f"plain LoRA does not depend on the base's {name}")


def on_device(pool: AdapterPool) -> set[AdapterDigest]:
    return {digest for digest, place in pool.places().items() if place == "device"}


def num_pinned(pool: AdapterPool) -> int:
    return sum(slot.pins > 0 for slot in pool._slots._slot_by_digest.values())


class Bench:
    """A pool, the adapters on its disk, a clock, and a way to wait for the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.changes = threading.Semaphore(0)
        self.pools: list[AdapterPool] = []

    def refs(self, count: int) -> list[AdapterRef]:
        made = []
        for index in range(count):
            path = write(self.folder / f"a{index}", tensors=make_tensors(seed=index))
            made.append(reference(f"a{index}", path))
        return made

    def pool(
        self,
        refs: list[AdapterRef],
        slots: int = 2,
        host: int = 4,
        max_bytes: int = 1 << 30,
        loader: AdapterLoader | None = None,
        **options: Any,
    ) -> AdapterPool:
        pool = AdapterPool(
            refs,
            loader or AdapterLoader(SHAPES, 16, torch.float32, opens(no_base)),
            replace(make_resolved(slots, host), max_device_adapter_bytes=max_bytes),
            torch.device("cpu"),
            on_change=self.changes.release,
            clock=lambda: self.now_s,
            **options,
        )
        self.pools.append(pool)
        return pool

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Look again after every change, as the engine's loop does."""
        while not condition():
            assert self.changes.acquire(timeout=WAIT_S)

    def pin(self, pool: AdapterPool, digest: AdapterDigest) -> None:
        pool.prepare(digest)
        self.wait_until(lambda: pool.try_pin(digest))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for pool in bench.pools:
        pool.close()


def test_an_adapter_is_prepared_in_the_background_then_pinned_and_found(bench: Bench) -> None:
    ref = bench.refs(1)[0]
    pool = bench.pool([ref])
    bench.pin(pool, ref.digest)
    assert pool.weights(ref.digest).projection(0, "q_proj") is not None
    assert on_device(pool) == {ref.digest}
    assert num_pinned(pool) == 1
    pool.unpin(ref.digest)
    assert num_pinned(pool) == 0
    assert pool.error(ref.digest) is None


def test_an_adapter_is_read_from_where_it_is_located_and_one_that_is_nowhere_fails(bench: Bench) -> None:
    here, nowhere = bench.refs(2)

    def locate(ref: AdapterRef) -> AdapterRef:
        if ref.digest == nowhere.digest:
            raise AdapterError(ref.name, "its files are on another node, which does not answer")
        return here

    pool = bench.pool([replace(ref, path="/another/node") for ref in (here, nowhere)], locate=locate)
    bench.pin(pool, here.digest)
    pool.prepare(nowhere.digest)
    bench.wait_until(lambda: pool.error(nowhere.digest))
    assert "does not answer" in str(pool.error(nowhere.digest))
    assert (pool.loads.num_loaded, pool.loads.num_failed) == (1, 1)
    assert pool.loads.num_bytes == pool.weights(here.digest).num_bytes > 0


def test_pinning_loads_even_without_a_prepare(bench: Bench) -> None:
    ref = bench.refs(1)[0]
    pool = bench.pool([ref])
    bench.wait_until(lambda: pool.try_pin(ref.digest))
    assert num_pinned(pool) == 1


def test_pinned_adapters_hold_their_slots_and_a_freed_one_goes_to_whoever_waits(bench: Bench) -> None:
    one, two, three = bench.refs(3)
    pool = bench.pool([one, two, three], slots=2)
    bench.pin(pool, one.digest)
    bench.pin(pool, two.digest)
    pool.prepare(three.digest)
    bench.wait_until(lambda: len(pool._host._entry_by_digest) == 3)
    assert not pool.try_pin(three.digest)
    assert pool.waits_for_slot(three.digest)
    assert not pool.waits_for_slot(one.digest)
    assert pool.num_resident() == 2
    pool.unpin(one.digest)
    assert pool.try_pin(three.digest)
    assert on_device(pool) == {two.digest, three.digest}
    with pytest.raises(EngineError, match=one.digest):
        pool.weights(one.digest)


def test_many_adapters_are_served_in_turn_by_few_slots_in_bounded_memory(bench: Bench) -> None:
    refs = bench.refs(40)
    pool = bench.pool(refs, slots=2, host=3)
    for ref in refs + refs[:5]:
        bench.pin(pool, ref.digest)
        assert len(pool._host._entry_by_digest) <= 3
        assert len(on_device(pool)) <= 2
        pool.unpin(ref.digest)


def test_on_a_cpu_slots_and_host_memory_are_within_one_bound(bench: Bench) -> None:
    refs = bench.refs(12)
    pool = bench.pool(refs, slots=4, host=4)
    hot = refs[0].digest
    bench.pin(pool, hot)
    kept = pool.weights(hot)
    for ref in refs[1:]:
        pool.prepare(ref.digest)
        bench.wait_until(lambda ref=ref: ref.digest in pool._host)
        assert len(pool.places()) <= 4
        bench.pin(pool, ref.digest)
        assert len(pool.places()) <= 4
        pool.unpin(ref.digest)
    assert pool.weights(hot) is kept is pool._host.peek(hot)


def test_on_a_cpu_nothing_is_loaded_beside_pinned_adapters_that_fill_the_memory(bench: Bench) -> None:
    *pinned, other = bench.refs(4)
    pool = bench.pool([*pinned, other], slots=4, host=3)
    for ref in pinned:
        bench.pin(pool, ref.digest)
    assert not pool.try_pin(other.digest)
    assert pool.waits_for_slot(other.digest)
    assert pool.places() == {ref.digest: "device" for ref in pinned}
    pool.unpin(pinned[0].digest)
    assert not pool.waits_for_slot(other.digest)
    bench.pin(pool, other.digest)
    assert pool.places().keys() == {ref.digest for ref in (*pinned[1:], other)}


def test_adapters_of_all_sizes_share_one_budget_of_bytes(bench: Bench) -> None:
    ranks = {"small": 1, "other": 1, "large": 8, "huge": 16}
    refs = [
        reference(name, write(bench.folder / name, make_config(r=rank), make_tensors(rank=rank, seed=seed)))
        for seed, (name, rank) in enumerate(ranks.items())
    ]
    one = 2 * 4 * (16 + 16)  # two layers, float32, A and B of q_proj
    pool = bench.pool(refs, max_bytes=9 * one)
    small, other, large, huge = (ref.digest for ref in refs)
    for digest in (small, other):
        bench.pin(pool, digest)
        pool.unpin(digest)
    assert pool._slots._own_bytes == 2 * one
    bench.pin(pool, large)
    assert on_device(pool) == {other, large}
    assert pool._slots._own_bytes == 9 * one
    pool.prepare(huge)
    bench.wait_until(lambda: pool.error(huge))
    assert f"{16 * one} bytes, more than the {9 * one}" in str(pool.error(huge))


def test_what_finds_no_room_lies_in_what_the_cache_lends_until_that_is_wanted_back(bench: Bench) -> None:
    refs = bench.refs(3)
    one = 2 * 4 * (4 * 16 + 8 * 16)  # two layers, float32, A of q_proj and B with its rows of 4 made 8
    memory = {run: [torch.zeros(one // 2, dtype=torch.uint8) for _ in range(4)] for run in (range(4, 8), range(4))}
    loader = AdapterLoader(
        SHAPES, 16, torch.float32, opens(no_base), lambda raw: TabledAdapter.of(raw.scaled(), 2, page_bytes=one // 2)
    )
    pool = bench.pool(refs, slots=8, host=32, max_bytes=one, loader=loader, lent_memory=memory.__getitem__)
    bench.pin(pool, refs[0].digest)
    assert not pool.lacked_room()
    pool.prepare(refs[1].digest)
    bench.wait_until(lambda: pool.waits_for_slot(refs[1].digest))
    assert not pool.try_pin(refs[1].digest)
    assert pool.lacked_room()
    assert not pool.lacked_room()
    for run in memory:
        pool.lend(run)
    for ref in refs[1:]:
        bench.pin(pool, ref.digest)
        weights = pool.weights(ref.digest)
        inside = {page.data_ptr() for pages in memory.values() for page in pages}
        assert isinstance(weights, TabledAdapter)
        assert weights.num_pages == 2
        assert weights.flat.data_ptr() in inside
    assert pool._slots._own_bytes == one
    # Both lie in one loan, so that the other can end.
    empty = pool.give_back()
    assert empty is not None
    assert pool.give_back() is None
    for ref in refs[1:]:
        pool.unpin(ref.digest)
    assert {empty, pool.give_back()} == {*memory}
    assert on_device(pool) == {refs[0].digest}


def test_a_crowd_that_waits_for_one_slot_is_served_to_the_last(bench: Bench) -> None:
    refs = bench.refs(6)
    pool = bench.pool(refs, slots=1, host=2)
    waiting = [ref.digest for ref in refs]
    for digest in waiting:
        pool.prepare(digest)
    served = []
    while waiting:
        pinned = [digest for digest in waiting if pool.try_pin(digest)]
        if not pinned:
            bench.now_s += 0.01
            assert bench.changes.acquire(timeout=WAIT_S)
        for digest in pinned:
            served.append(digest)
            waiting.remove(digest)
            pool.unpin(digest)
            bench.changes.release()
    assert sorted(served) == sorted(ref.digest for ref in refs)


def test_an_adapter_is_shared_by_requests_and_leaves_only_after_the_last(bench: Bench) -> None:
    one, two = bench.refs(2)
    pool = bench.pool([one, two], slots=1)
    bench.pin(pool, one.digest)
    assert pool.try_pin(one.digest)
    pool.unpin(one.digest)
    pool.prepare(two.digest)
    bench.wait_until(lambda: len(pool._host._entry_by_digest) == 2)
    assert not pool.try_pin(two.digest)
    pool.unpin(one.digest)
    assert pool.try_pin(two.digest)


def test_an_adapter_that_does_not_fit_fails_with_a_sentence_and_the_others_go_on(bench: Bench) -> None:
    good = bench.refs(1)[0]
    path = write(bench.folder / "wide", make_config(r=32), make_tensors(rank=32))
    bad = reference("wide", path)
    pool = bench.pool([good, bad])
    pool.prepare(bad.digest)
    bench.wait_until(lambda: pool.error(bad.digest))
    error = pool.error(bad.digest)
    assert error is not None
    assert "rank 32, more than the 16" in error
    assert not pool.try_pin(bad.digest)
    bench.pin(pool, good.digest)


def test_an_unknown_digest_is_an_error_and_never_pinned(bench: Bench) -> None:
    pool = bench.pool([])
    unknown = AdapterDigest("0" * 64)
    pool.prepare(unknown)
    assert not pool.try_pin(unknown)
    assert pool.error(unknown) == "The adapter is not declared on this replica."


def test_a_declared_adapter_is_usable_at_once_and_clears_a_failure(bench: Bench) -> None:
    ref = bench.refs(1)[0]
    pool = bench.pool([])
    pool.declare(ref)
    tensors = Path(ref.path, "adapter_model.safetensors")
    content = tensors.read_bytes()
    tensors.unlink()
    pool.prepare(ref.digest)
    bench.wait_until(lambda: pool.error(ref.digest))
    assert "missing" in (pool.error(ref.digest) or "")
    tensors.write_bytes(content)
    pool.declare(ref)
    bench.pin(pool, ref.digest)


def test_changed_files_do_not_pass_for_the_declared_content_and_running_requests_keep_theirs(bench: Bench) -> None:
    one, two = bench.refs(2)
    pool = bench.pool([one, two], slots=1, host=1)
    bench.pin(pool, one.digest)
    held = pool.weights(one.digest).projection(0, "q_proj")
    assert held is not None
    before = held.b.clone()
    write(Path(one.path), tensors=make_tensors(seed=99))
    assert torch.equal(held.b, before)
    pool.unpin(one.digest)
    bench.pin(pool, two.digest)
    pool.unpin(two.digest)
    pool.prepare(one.digest)
    bench.wait_until(lambda: pool.error(one.digest))
    assert "have been overwritten" in (pool.error(one.digest) or "")


def test_a_released_adapter_is_free_once_nobody_holds_it(bench: Bench) -> None:
    (ref,) = bench.refs(1)
    pool = bench.pool([ref])
    bench.pin(pool, ref.digest)
    assert pool.places() == {ref.digest: "device"}
    assert pool.release(ref.digest) is None
    assert pool.weights(ref.digest) is not None
    pool.unpin(ref.digest)
    freed = pool.release(ref.digest)
    assert freed is not None
    assert freed > 0
    assert pool.places() == {}
    assert pool._host._num_bytes == 0
    assert pool.error(ref.digest) is not None
    assert pool.release(ref.digest) == 0
    pool.learn(ref)
    bench.pin(pool, ref.digest)


def test_one_released_while_it_is_read_and_declared_at_once_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load that the release had ended told the next request of its failure."""
    (ref,) = bench.refs(1)
    released: list[AdapterRef] = []

    def locate(given: AdapterRef) -> AdapterRef:
        if not released:
            released.append(given)
            pool.release(given.digest)
        return given

    def declared(digest: AdapterDigest) -> tuple[AdapterRef, ...]:
        try:
            return look(digest)
        except AdapterError:
            pool.declare(ref)
            raise

    pool = bench.pool([ref], locate=locate)
    look = pool._declared
    monkeypatch.setattr(pool, "_declared", declared)
    pool.prepare(ref.digest)
    bench.wait_until(lambda: not pool.places())
    assert pool.error(ref.digest) is None
    bench.pin(pool, ref.digest)


def test_what_is_known_is_not_tried_again_by_every_request_that_names_it(bench: Bench) -> None:
    (ref,) = bench.refs(1)
    pool = bench.pool([ref])
    (bench.folder / "a0" / "adapter_model.safetensors").unlink()
    pool.prepare(ref.digest)
    bench.wait_until(lambda: pool.error(ref.digest))
    pool.learn(ref)
    assert pool.error(ref.digest) is not None
    pool.declare(ref)
    assert pool.error(ref.digest) is None


def test_one_whose_files_have_moved_is_read_where_they_are_now(bench: Bench) -> None:
    (ref,) = bench.refs(1)
    pool = bench.pool([ref])
    (bench.folder / "a0" / "adapter_model.safetensors").unlink()
    pool.prepare(ref.digest)
    bench.wait_until(lambda: pool.error(ref.digest))
    pool.learn(replace(ref, path=write(bench.folder / "moved", tensors=make_tensors(seed=0))))
    assert pool.error(ref.digest) is None
    bench.pin(pool, ref.digest)


def test_one_that_another_name_has_lost_is_read_from_its_own_files(bench: Bench) -> None:
    """Both names' requests wait for one load, and its failure ended those of either."""
    one, other = bench.refs(2)
    lost = replace(one, name="lost", path=other.path)
    pool = bench.pool([other], slots=1, host=1)
    for refs in (one, lost), (lost, one):
        for ref in refs:
            pool.learn(ref)
        bench.pin(pool, one.digest)
        pool.unpin(one.digest)
        bench.pin(pool, other.digest)
        pool.unpin(other.digest)
    assert pool.loads.num_failed == 0
    pool.release(one.digest)
    pool.learn(lost)
    pool.prepare(lost.digest)
    bench.wait_until(lambda: pool.error(lost.digest))
    # Nothing is tried again but what is new.
    pool.learn(lost)
    assert "have been overwritten" in (pool.error(lost.digest) or "")
    pool.learn(one)
    bench.pin(pool, one.digest)


def test_what_is_unloaded_while_it_is_read_does_not_stay(bench: Bench) -> None:
    """Nobody could free it any more: no name stands for it."""
    ref = bench.refs(1)[0]
    is_read, may_end = threading.Event(), threading.Event()

    def locate(found: AdapterRef) -> AdapterRef:
        is_read.set()
        assert may_end.wait(WAIT_S)
        return found

    pool = bench.pool([ref], locate=locate)
    pool.prepare(ref.digest)
    assert is_read.wait(WAIT_S)
    assert pool.release(ref.digest) == 0
    may_end.set()
    bench.wait_until(lambda: "loading" not in pool.places().values())
    assert pool.places() == {}
    # Loaded again it is read again, at once.
    pool.learn(ref)
    bench.pin(pool, ref.digest)
    pool.unpin(ref.digest)
