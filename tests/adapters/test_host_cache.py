from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.host_cache import NUM_THREADS, PASSING_S, RESERVE_S, HostCache
from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights, RawProjection
from tests.adapters.handmade import packed
from tests.adapters.stepwise import Later, Sized

WAIT_S = 20.0


def make_weights() -> AdapterWeights:
    raw = RawProjection(a=torch.zeros(1, 4), b=torch.zeros(4, 1), scaling=1.0)
    return packed({(0, "q_proj"): raw}, torch.float32)


BYTES = make_weights().num_bytes


class Disk:
    """Adapters that load when told to; counts who was loaded, and tells when something has changed."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.changes = threading.Semaphore(0)
        self.now_s = 0.0

    def load(self, digest: AdapterDigest) -> AdapterWeights:
        assert self.gate.wait(WAIT_S)
        self.loaded.append(digest)
        if digest in self.faults:
            raise self.faults[digest]
        return make_weights()

    def cache(self, room_for: int = 3) -> HostCache:
        return HostCache(
            self.load,
            max_bytes=room_for * BYTES,
            on_change=self.changes.release,
            clock=lambda: self.now_s,
        )

    def wait(self, changes: int = 1) -> None:
        for _ in range(changes):
            assert self.changes.acquire(timeout=WAIT_S)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.gate.set()


def fetch(disk: Disk, cache: HostCache, digest: str) -> AdapterWeights | None:
    cache.request(AdapterDigest(digest))
    disk.wait()
    return cache.get(AdapterDigest(digest))


def test_asking_returns_at_once_and_the_adapter_comes_later(disk: Disk) -> None:
    cache = disk.cache()
    disk.gate.clear()
    cache.request(AdapterDigest("a"))
    cache.request(AdapterDigest("a"))
    assert cache.get(AdapterDigest("a")) is None
    disk.gate.set()
    disk.wait()
    assert cache.get(AdapterDigest("a")) is not None
    cache.request(AdapterDigest("a"))
    assert disk.loaded == ["a"]
    assert cache._num_bytes == BYTES
    cache.close()


def test_several_load_at_once(disk: Disk) -> None:
    both = threading.Barrier(2)

    def load(_: AdapterDigest) -> AdapterWeights:
        both.wait(WAIT_S)
        return make_weights()

    cache = HostCache(load, max_bytes=1 << 20, on_change=disk.changes.release)
    cache.request(AdapterDigest("a"))
    cache.request(AdapterDigest("b"))
    disk.wait(2)
    assert len(cache._entry_by_digest) == 2
    cache.close()


def test_one_that_is_read_for_long_holds_up_nobody_else(disk: Disk) -> None:
    def load(digest: AdapterDigest) -> AdapterWeights:
        assert digest != "slow" or disk.gate.wait(WAIT_S)
        return make_weights()

    cache = HostCache(load, max_bytes=1 << 20, on_change=disk.changes.release)
    disk.gate.clear()
    cache.request(AdapterDigest("slow"))
    for digest in "abcd":
        assert fetch(disk, cache, digest) is not None
    assert cache.get(AdapterDigest("slow")) is None
    disk.gate.set()
    disk.wait()
    assert cache.get(AdapterDigest("slow")) is not None
    cache.close()


def test_the_least_recently_used_entry_goes_when_the_bytes_are_reached(disk: Disk) -> None:
    cache = disk.cache(room_for=2)
    fetch(disk, cache, "a")
    fetch(disk, cache, "b")
    assert cache.get(AdapterDigest("a")) is not None
    fetch(disk, cache, "c")
    assert cache.get(AdapterDigest("b")) is None
    assert cache.get(AdapterDigest("a")) is not None
    assert cache._num_bytes == 2 * BYTES
    cache.close()


def test_a_crowd_is_let_in_as_far_as_there_is_room_for_all_of_it(disk: Disk) -> None:
    cache = disk.cache(room_for=3)
    disk.gate.clear()
    crowd = [AdapterDigest(name) for name in "abcdefgh"]
    for digest in crowd:
        cache.request(digest)
    assert len(cache.places()) == 2, "nobody knows yet how much each takes"
    disk.gate.set()
    disk.wait(2)
    for digest in crowd:
        cache.request(digest)
    disk.wait()
    assert sorted(cache.places()) == ["a", "b", "c"]
    for digest in crowd[:3]:
        assert cache.get(digest) is not None
    for digest in crowd[3:]:
        assert fetch(disk, cache, digest) is not None
    assert cache._num_bytes == 3 * BYTES
    cache.close()


def test_one_that_is_larger_than_all_room_is_held_alone(disk: Disk) -> None:
    cache = disk.cache(room_for=0)
    assert fetch(disk, cache, "a") is not None
    assert fetch(disk, cache, "b") is not None
    assert cache.places() == {"b": "host"}
    cache.close()


def test_an_entry_nobody_has_got_keeps_its_place_for_a_while(disk: Disk) -> None:
    cache = disk.cache(room_for=1)
    cache.request(AdapterDigest("a"))
    disk.wait()
    cache.request(AdapterDigest("b"))
    assert disk.loaded == ["a"]
    disk.now_s = 5.0
    assert fetch(disk, cache, "b") is not None
    assert cache.get(AdapterDigest("a")) is None
    cache.close()


def test_a_failure_is_told_remembered_for_a_while_and_then_tried_again(disk: Disk) -> None:
    cache = disk.cache()
    bad = AdapterDigest("bad")
    disk.faults["bad"] = AdapterError("bad", "it is broken")
    assert fetch(disk, cache, "bad") is None
    assert cache.error(bad) == "Adapter 'bad' cannot be used: it is broken."
    cache.request(bad)
    assert disk.loaded == ["bad"]
    disk.now_s = 10.0
    del disk.faults["bad"]
    assert cache.error(bad) is None
    assert fetch(disk, cache, "bad") is not None
    cache.close()


def test_files_that_could_not_be_had_are_asked_for_again_soon(disk: Disk) -> None:
    """They lay on a node whose registry was being started again: for ten seconds every request had an error."""
    cache = disk.cache()
    far = AdapterDigest("far")
    disk.faults["far"] = AdapterUnavailableError("far", "its files are on another node, which does not answer")
    assert fetch(disk, cache, "far") is None
    assert "does not answer" in str(cache.error(far))
    assert cache.passes(far)
    del disk.faults["far"]
    disk.now_s = PASSING_S
    assert cache.error(far) is None
    assert not cache.passes(far)
    assert fetch(disk, cache, "far") is not None
    disk.faults["bad"] = AdapterError("bad", "it is broken")
    fetch(disk, cache, "bad")
    assert not cache.passes(AdapterDigest("bad"))
    cache.close()


def test_who_asks_only_after_a_long_step_is_told_too_that_files_could_not_be_had(disk: Disk) -> None:
    """With steps of more than a second nobody was: the files were asked for again and again, and the client waited."""
    cache = disk.cache()
    far = AdapterDigest("far")
    disk.faults["far"] = AdapterUnavailableError("far", "its files are on another node, which does not answer")
    assert fetch(disk, cache, "far") is None
    disk.now_s = 3 * PASSING_S
    assert "does not answer" in str(cache.error(far))
    assert cache.passes(far)
    disk.now_s = 3.5 * PASSING_S
    assert cache.error(far) is not None
    disk.now_s = 4 * PASSING_S
    assert cache.error(far) is None
    cache.close()


def test_a_failure_can_be_forgotten_at_once(disk: Disk) -> None:
    cache = disk.cache()
    cache.fail(AdapterDigest("a"), "no")
    cache.forget_failure(AdapterDigest("a"))
    assert fetch(disk, cache, "a") is not None
    cache.close()


def test_a_failure_that_is_forgotten_while_it_happens_is_not_remembered(disk: Disk) -> None:
    """A load that had begun with the damaged files failed after these were repaired."""
    repaired: list[AdapterDigest] = []

    def load(digest: AdapterDigest) -> AdapterWeights:
        if not repaired:
            repaired.append(digest)
            cache.forget_failure(digest)
            raise AdapterError(digest, "its files are damaged")
        return disk.load(digest)

    changes = threading.Semaphore(0)
    cache = HostCache(load, max_bytes=1 << 20, on_change=changes.release)
    digest = AdapterDigest("a")
    for _ in range(2):
        assert cache.error(digest) is None
        cache.request(digest)
        assert changes.acquire(timeout=30)
    assert cache.get(digest) is not None
    cache.close()


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_one_that_is_dropped_while_it_loads_is_not_kept_unless_it_is_asked_for_again(
    disk: Disk, is_asked_again: bool
) -> None:
    digest = AdapterDigest("a")
    disk.gate.clear()
    cache = disk.cache()
    cache.request(digest)
    assert cache.drop(digest) == 0
    if is_asked_again:
        cache.request(digest)
    disk.gate.set()
    disk.wait()
    assert cache.places() == ({digest: "host"} if is_asked_again else {})
    # What was dropped once is kept when it comes again.
    assert is_asked_again or fetch(disk, cache, "a") is not None
    cache.close()


def test_a_bug_while_loading_is_a_failure_without_its_text(disk: Disk) -> None:
    cache = disk.cache()
    disk.faults |= {"a": OSError("/secret/path"), "bug": KeyError("secret")}
    fetch(disk, cache, "bug")
    assert cache.error(AdapterDigest("bug")) == "The adapter could not be loaded."
    assert not cache.passes(AdapterDigest("bug"))
    fetch(disk, cache, "a")
    assert cache.error(AdapterDigest("a")) == "The adapter could not be loaded."
    assert cache.passes(AdapterDigest("a"))
    assert fetch(disk, cache, "b") is not None
    cache.close()


def test_closing_waits_for_the_loads_under_way_and_keeps_nothing(disk: Disk) -> None:
    cache = disk.cache()
    fetch(disk, cache, "a")
    cache.close()
    cache.close()
    cache.request(AdapterDigest("b"))
    assert len(cache._entry_by_digest) == 0
    assert cache._num_bytes == 0
    assert disk.loaded == ["a"]


def test_who_waits_for_room_makes_nobody_measure_the_entries_again() -> None:
    """Each waiting adapter added up all tensors of all pinned ones before every step: seconds with some hundreds."""
    weights = [Sized(10) for _ in range(4)]
    held = frozenset(AdapterDigest(name) for name in "0123")
    cache = HostCache(lambda digest: weights[int(digest)], max_bytes=40, held=lambda: held)
    cache._threads = later = Later()
    for digest in sorted(held):
        cache.request(digest)
        later.jobs.pop()()
        cache.get(digest)
    before = [item.num_asked for item in weights]
    for index in range(4, 50):
        cache.request(AdapterDigest(str(index)))
    assert not later.jobs
    assert [item.num_asked for item in weights] == before
    cache.close()


def test_the_room_that_comes_is_for_who_waited_for_it_not_for_requests_ahead_of_need() -> None:
    """New arrivals took it each time before it was asked for again."""
    now_s = 0.0
    cache = HostCache(lambda digest: Sized(10), max_bytes=15, clock=lambda: now_s)
    cache._threads = later = Later()
    first, waiting, newcomer = (AdapterDigest(name) for name in "abc")
    cache.request(first)
    later.jobs.pop()()
    cache.request(newcomer, is_ahead=True)
    cache.request(waiting)
    now_s = RESERVE_S
    cache.request(newcomer, is_ahead=True)
    assert not later.jobs
    cache.request(waiting)
    assert cache.places() == {first: "host", waiting: "loading"}
    later.jobs.pop()()
    assert cache.get(waiting) is not None
    cache.request(newcomer, is_ahead=True)
    assert cache.places() == {waiting: "host", newcomer: "loading"}
    cache.close()


def test_only_what_finds_no_room_beside_held_entries_waits_for_them() -> None:
    one, two, other = (AdapterDigest(name) for name in ("one", "two", "other"))
    held = [one]
    cache = HostCache(lambda digest: Sized(10), max_bytes=25, held=lambda: frozenset(held))
    cache._threads = later = Later()
    cache.request(one)
    later.jobs.pop()()
    cache.get(one)
    cache.request(two)
    later.jobs.pop()()
    cache.request(other)
    assert not later.jobs
    assert not cache.waits_for_held(other), "it waits for one that is reserved"
    cache.get(two)
    held.append(two)
    assert cache.waits_for_held(other)
    assert not cache.waits_for_held(two)
    held.clear()
    assert not cache.waits_for_held(other)
    cache.close()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_room_that_is_left_is_what_adding_everything_up_tells(data: st.DataObject) -> None:
    held: frozenset[AdapterDigest] = frozenset()
    now_s = 0.0
    max_bytes = data.draw(st.integers(0, 60))
    names = [AdapterDigest(name) for name in "abcdef"]
    cache = HostCache(
        lambda digest: Sized(data.draw(st.integers(1, 20))),
        max_bytes=max_bytes,
        held=lambda: held,
        clock=lambda: now_s,
    )
    cache._threads = later = Later()
    for _ in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(["request", "load", "get", "hold", "let go", "drop", "wait"])):
            case "request":
                cache.request(name)
            case "load" if later.jobs:
                later.jobs.pop(0)()
            case "get":
                cache.get(name)
            case "hold" if cache.get(name) is not None:
                held |= {name}
            case "let go" if name in held:
                held -= {name}
            case "drop" if name not in held:
                cache.drop(name)
            case "wait":
                now_s += data.draw(st.sampled_from([1.0, RESERVE_S]))
        size_by_digest = {digest: entry.weights.num_bytes for digest, entry in cache._entry_by_digest.items()}
        reserved = {digest for digest, loaded_s in cache._loaded_s_by_digest.items() if now_s - loaded_s < RESERVE_S}
        kept, num_loading = held | reserved, len(cache._loading)
        has_room = num_loading < NUM_THREADS
        if size_by_digest:
            load_bytes = (num_loading + 1) * sum(size_by_digest.values()) / len(size_by_digest)
            kept_bytes = sum(size_by_digest[digest] for digest in kept)
            has_room = (not kept and not num_loading) or kept_bytes + load_bytes <= max_bytes
        assert cache._num_bytes == sum(size_by_digest.values())
        assert cache._has_room() == has_room
    cache.close()
