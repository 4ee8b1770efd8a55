from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters import device_slots
from adapters.device_slots import DeviceSlots
from adapters.identity import AdapterDigest

A, B, C, D = map(AdapterDigest, "abcd")
RUN, OTHER_RUN = range(4, 8), range(8, 12)


def place(slots: DeviceSlots, digest: AdapterDigest, now_s: float = 0.0) -> list[AdapterDigest] | None:
    evicted = slots.try_take(digest, 1, now_s)
    if evicted is not None:
        slots.land(digest, now_s)
    return evicted


def test_pinned_slots_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 500 waiting adapters looked at all 256 slots in every step: 20 ms."""
    slots, looked_at = DeviceSlots(3, 10, reserve_s=0), list[object]()
    for digest in (A, B):
        place(slots, digest)
        slots.pin(digest)
    slots.try_take(C, 1, 0)
    is_evictable = device_slots._is_evictable
    monkeypatch.setattr(
        device_slots, "_is_evictable", lambda slot, now_s: looked_at.append(slot) or is_evictable(slot, now_s)
    )
    assert slots.try_take(D, 1, 0) is None
    assert len(looked_at) == 1
    slots.unpin(A)
    assert slots.try_take(D, 1, 0) == [A]


def test_the_least_recently_used_unpinned_adapter_goes_first() -> None:
    slots = DeviceSlots(2, 10, reserve_s=0)
    place(slots, A)
    place(slots, B)
    slots.pin(A)
    slots.unpin(A)
    assert place(slots, C) == [B]
    slots.check()


def test_a_pinned_or_travelling_adapter_is_never_evicted() -> None:
    slots = DeviceSlots(2, 10, reserve_s=0)
    place(slots, A)
    slots.pin(A)
    slots.try_take(B, 1, 0)
    assert slots.try_take(C, 1, 100) is None
    slots.unpin(A)
    assert slots.try_take(C, 1, 100) == [A]


def test_an_adapter_is_pinned_until_the_last_that_pinned_it_is_done() -> None:
    """The host cache counts on it: it would evict the memory of an adapter in use."""
    slots = DeviceSlots(1, 10, reserve_s=0)
    place(slots, A)
    slots.pin(A)
    slots.pin(A)
    slots.unpin(A)
    assert slots.pinned == {A}
    slots.check()
    slots.unpin(A)
    assert not slots.pinned
    slots.check()


def test_as_many_go_as_make_room_for_the_bytes_and_none_where_they_would_not_do() -> None:
    slots = DeviceSlots(8, 10, reserve_s=0)
    for digest, num_bytes in ((A, 3), (B, 3), (C, 4)):
        slots.try_take(digest, num_bytes, 0)
        slots.land(digest, 0)
    slots.pin(C)
    assert slots.try_take(D, 7, 1) is None
    assert len(slots._slot_by_digest) == 3
    assert slots.try_take(D, 4, 1) == [A, B]
    assert slots._own_bytes == 8
    slots.check()


def test_an_adapter_that_landed_for_somebody_waits_for_him_but_not_for_ever() -> None:
    slots = DeviceSlots(1, 10, reserve_s=1.0)
    place(slots, A, now_s=10)
    assert slots.try_take(B, 1, 10.9) is None
    assert slots.try_take(B, 1, 11.0) == [A]


def test_a_slot_whose_adapter_did_not_arrive_is_free_again() -> None:
    slots = DeviceSlots(1, 10)
    slots.try_take(A, 1, 0)
    assert not slots.has_landed(A)
    slots.drop(A)
    assert slots._own_bytes == 0
    place(slots, B)
    slots.drop(B)
    assert B in slots


def test_lent_pages_hold_what_own_memory_does_not_and_an_adapter_lies_in_one_kind() -> None:
    slots = DeviceSlots(8, 10, reserve_s=0)
    slots.lend(RUN, 4)
    for digest, num_bytes in ((A, 8), (B, 6), (C, 3)):
        assert slots.try_take(digest, num_bytes, 0, num_pages=2) == []
        slots.land(digest, 0)
    assert [len(slots.pages(digest)) for digest in (A, B, C)] == [0, 2, 2]
    assert slots._own_bytes == 8
    assert not slots.lacks_room
    # One that does not fit a page goes where A was.
    assert slots.try_take(D, 9, 1) == [A]
    assert slots.pages(D) == ()
    assert not slots.lacks_room
    slots.check()


def test_who_evicts_or_is_refused_for_want_of_memory_lacks_room_and_for_want_of_a_slot_does_not() -> None:
    slots = DeviceSlots(2, 10, reserve_s=0)
    assert slots.try_take(A, 8, 0, num_pages=2) == []
    assert slots.try_take(B, 8, 0, num_pages=2) is None
    assert slots.lacks_room
    slots.land(A, 0)
    slots.lacks_room = False
    assert slots.try_take(B, 8, 1, num_pages=2) == [A]
    assert slots.lacks_room
    full = DeviceSlots(1, 10, reserve_s=0)
    place(full, A)
    assert full.try_take(B, 1, 1, num_pages=1) == [A]
    assert not full.lacks_room


def test_a_loan_is_given_back_without_those_in_it_unless_one_is_in_use_or_on_its_way() -> None:
    slots = DeviceSlots(8, 1, reserve_s=0)
    slots.lend(RUN, 2)
    slots.lend(OTHER_RUN, 2)
    for digest in (A, B, C):
        slots.try_take(digest, 5, 0, num_pages=1)
        slots.land(digest, 0)
    slots.try_take(D, 5, 0, num_pages=1)
    run = slots.pages(A)[0].run
    assert slots.pages(B)[0].run == run
    assert slots.pages(C)[0].run == slots.pages(D)[0].run != run
    slots.pin(B)
    assert slots.give_back(1) is None
    slots.land(D, 0)
    assert slots.give_back(1) == (OTHER_RUN if run == RUN else RUN, [C, D])
    slots.unpin(B)
    assert slots.give_back(1) == (run, [A, B])
    assert slots.give_back(1) is None
    slots.check()


def test_wrong_use_is_an_error() -> None:
    slots = DeviceSlots(1, 10)
    slots.try_take(A, 1, 0)
    with pytest.raises(KeyError):
        slots.pin(A)
    slots.land(A, 0)
    with pytest.raises(KeyError):
        slots.unpin(A)


class SlotMachine(RuleBasedStateMachine):
    """Random use against a model that only counts pins."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = DeviceSlots(5, 10, reserve_s=2.0)
        self.lent: list[range] = []
        self.pins: dict[AdapterDigest, int] = {}
        self.now_s = 0.0

    digests = st.sampled_from([AdapterDigest(letter) for letter in "abcdefgh"])

    @rule(digest=digests, num_bytes=st.integers(1, 7), num_pages=st.integers(0, 3))
    def take(self, digest: AdapterDigest, num_bytes: int, num_pages: int) -> None:
        if digest in self.slots:
            return
        had_room = len(self.slots._slot_by_digest) < 5 and self.slots._own_bytes + num_bytes <= 10
        evicted = self.slots.try_take(digest, num_bytes, self.now_s, num_pages)
        assert evicted is None or len(self.slots.pages(digest)) in (0, num_pages)
        assert not had_room or evicted == []
        for victim in evicted or []:
            assert self.pins.pop(victim, 0) == 0
            assert victim not in self.slots

    @rule(num_pages=st.integers(1, 3))
    def lend(self, num_pages: int) -> None:
        if len(self.lent) < 4:
            self.lent.append(next(run for start in range(5) if (run := range(start, start + 1)) not in self.lent))
            self.slots.lend(self.lent[-1], num_pages)

    @rule()
    def give_back(self) -> None:
        ended = self.slots.give_back(self.now_s)
        if ended is None:
            return
        run, evicted = ended
        self.lent.remove(run)
        for victim in evicted:
            assert self.pins.pop(victim, 0) == 0
            assert victim not in self.slots

    @rule(digest=digests)
    def land_or_drop(self, digest: AdapterDigest) -> None:
        if digest in self.slots and not self.slots.has_landed(digest):
            self.slots.land(digest, self.now_s)

    @rule(digest=digests)
    def pin(self, digest: AdapterDigest) -> None:
        if self.slots.has_landed(digest):
            self.slots.pin(digest)
            self.pins[digest] = self.pins.get(digest, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from([d for d, count in self.pins.items() if count]))
        self.slots.unpin(digest)
        self.pins[digest] -= 1

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds(self) -> None:
        self.slots.check()
        pinned = {digest for digest, slot in self.slots._slot_by_digest.items() if slot.pins}
        assert pinned == {digest for digest, count in self.pins.items() if count}
        assert all(self.slots.has_landed(d) for d, count in self.pins.items() if count)


SlotMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSlotMachine = SlotMachine.TestCase
