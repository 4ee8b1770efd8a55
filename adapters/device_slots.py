"""Which adapters hold a place on the device: a table of slots with pins, least recently used out first.

Pure: standard library only; times are given by the caller. A slot is

    taken ---------> landed <------> pinned by n requests
    (on its way)     (evictable)     (not evictable)

and one that landed for a waiting request is kept for it for a while, so that two requests that wait for one slot cannot
take it from each other for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from adapters.identity import AdapterDigest


@dataclass(slots=True, kw_only=True)
class _Slot:
    """`reserved_until_s`: time until which an adapter that nobody has pinned yet may not be evicted."""

    has_landed: bool = False
    pins: int = 0
    reserved_until_s: float = 0.0


class DeviceSlots:
    """The slots of one device. Not thread-safe: its owner holds a lock."""

    def __init__(self, num_slots: int, reserve_s: float = 1.0) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, and at least 1 is needed")
        self._num_slots = num_slots
        self._reserve_s = reserve_s
        # Least recently used first.
        self._slot_by_digest: OrderedDict[AdapterDigest, _Slot] = OrderedDict()

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._slot_by_digest

    def __len__(self) -> int:
        return len(self._slot_by_digest)

    def has_free(self) -> bool:
        """Tell whether a slot can be taken without evicting anybody."""
        return len(self._slot_by_digest) < self._num_slots

    def has_landed(self, digest: AdapterDigest) -> bool:
        """Tell whether the adapter's weights are there for use."""
        slot = self._slot_by_digest.get(digest)
        return slot is not None and slot.has_landed

    def can_take(self, now_s: float) -> bool:
        """Tell whether `try_take` would find a slot."""
        return self.has_free() or self._victim(now_s) is not None

    def try_take(self, digest: AdapterDigest, now_s: float) -> list[AdapterDigest] | None:
        """Take a slot for an adapter that has none; return whom that evicted, or None where no slot can be had."""
        evicted: list[AdapterDigest] = []
        if not self.has_free():
            victim = self._victim(now_s)
            if victim is None:
                return None
            del self._slot_by_digest[victim]
            evicted.append(victim)
        self._slot_by_digest[digest] = _Slot()
        return evicted

    def land(self, digest: AdapterDigest, now_s: float) -> None:
        """Note that the weights have arrived; they are kept at least `reserve_s` for the first to pin them."""
        slot = self._slot_by_digest[digest]
        slot.has_landed = True
        slot.reserved_until_s = now_s + self._reserve_s

    def pin(self, digest: AdapterDigest) -> None:
        """Keep a landed adapter until the pin is undone."""
        slot = self._slot_by_digest[digest]
        if not slot.has_landed:
            raise KeyError(f"adapter {digest} is not on the device")
        slot.pins += 1
        slot.reserved_until_s = 0.0
        self._slot_by_digest.move_to_end(digest)

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo one `pin`."""
        slot = self._slot_by_digest[digest]
        if slot.pins < 1:
            raise KeyError(f"adapter {digest} is not pinned")
        slot.pins -= 1

    def drop(self, digest: AdapterDigest) -> None:
        """Free the slot of an adapter that did not arrive; one that has landed stays."""
        slot = self._slot_by_digest.get(digest)
        if slot is not None and not slot.has_landed:
            del self._slot_by_digest[digest]

    def try_free(self, digest: AdapterDigest) -> bool:
        """Free the slot of an adapter, if it has one; return False where it is pinned or on its way."""
        slot = self._slot_by_digest.get(digest)
        if slot is None:
            return True
        if slot.pins or not slot.has_landed:
            return False
        del self._slot_by_digest[digest]
        return True

    def num_pinned(self) -> int:
        """Count the adapters that running requests hold."""
        return sum(slot.pins > 0 for slot in self._slot_by_digest.values())

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        assert len(self._slot_by_digest) <= self._num_slots
        for slot in self._slot_by_digest.values():
            assert slot.pins >= 0
            assert slot.has_landed or slot.pins == 0

    def _victim(self, now_s: float) -> AdapterDigest | None:
        """Return the least recently used adapter that may go."""
        return next((digest for digest, slot in self._slot_by_digest.items() if _is_evictable(slot, now_s)), None)


def _is_evictable(slot: _Slot, now_s: float) -> bool:
    return slot.has_landed and slot.pins == 0 and slot.reserved_until_s <= now_s
