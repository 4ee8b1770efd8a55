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

    num_bytes: int
    has_landed: bool = False
    pins: int = 0
    reserved_until_s: float = 0.0


class DeviceSlots:
    """The slots of one device, bounded in number and in bytes. Not thread-safe: its owner holds a lock."""

    def __init__(self, num_slots: int, max_bytes: int, reserve_s: float = 1.0) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, and at least 1 is needed")
        self._num_slots = num_slots
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._reserve_s = reserve_s
        # Least recently used first.
        self._slot_by_digest: OrderedDict[AdapterDigest, _Slot] = OrderedDict()

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._slot_by_digest

    def __len__(self) -> int:
        return len(self._slot_by_digest)

    def has_landed(self, digest: AdapterDigest) -> bool:
        """Tell whether the adapter's weights are there for use."""
        slot = self._slot_by_digest.get(digest)
        return slot is not None and slot.has_landed

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters that have a slot, those on their way included."""
        return self._num_bytes

    def try_take(self, digest: AdapterDigest, num_bytes: int, now_s: float) -> list[AdapterDigest] | None:
        """Take a slot for an adapter that has none; return whom that evicted, or None where there is no room."""
        evicted = self._victims(num_bytes, now_s)
        if evicted is None:
            return None
        for victim in evicted:
            self._free(victim)
        self._slot_by_digest[digest] = _Slot(num_bytes=num_bytes)
        self._num_bytes += num_bytes
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
            self._free(digest)

    def try_free(self, digest: AdapterDigest) -> bool:
        """Free the slot of an adapter, if it has one; return False where it is pinned or on its way."""
        slot = self._slot_by_digest.get(digest)
        if slot is None:
            return True
        if slot.pins or not slot.has_landed:
            return False
        self._free(digest)
        return True

    def num_pinned(self) -> int:
        """Count the adapters that running requests hold."""
        return sum(slot.pins > 0 for slot in self._slot_by_digest.values())

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        assert len(self._slot_by_digest) <= self._num_slots
        assert self._num_bytes == sum(slot.num_bytes for slot in self._slot_by_digest.values()) <= self._max_bytes
        for slot in self._slot_by_digest.values():
            assert slot.pins >= 0
            assert slot.has_landed or slot.pins == 0

    def _victims(self, num_bytes: int, now_s: float) -> list[AdapterDigest] | None:
        """Return the least recently used adapters that make room by going, None where those that may do not do."""
        num_left, bytes_left = len(self._slot_by_digest), self._num_bytes
        may_go = ((digest, slot) for digest, slot in self._slot_by_digest.items() if _is_evictable(slot, now_s))
        victims: list[AdapterDigest] = []
        while num_left >= self._num_slots or bytes_left + num_bytes > self._max_bytes:
            digest, slot = next(may_go, (None, None))
            if digest is None or slot is None:
                return None
            victims.append(digest)
            num_left -= 1
            bytes_left -= slot.num_bytes
        return victims

    def _free(self, digest: AdapterDigest) -> None:
        self._num_bytes -= self._slot_by_digest.pop(digest).num_bytes


def _is_evictable(slot: _Slot, now_s: float) -> bool:
    return slot.has_landed and slot.pins == 0 and slot.reserved_until_s <= now_s
