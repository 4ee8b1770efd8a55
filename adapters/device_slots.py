"""Adapter slots on the device: a table with pins and LRU eviction.

Pure: standard library only; the caller passes the time. A slot is

    taken ---------> landed <------> pinned by n requests
    (loading)        (evictable)     (not evictable)

A slot that landed for a waiting request is reserved for a while, so that two requests that wait for one slot cannot
take it from each other forever. When the adapter memory does not suffice, a slot may use pages lent by the KV cache.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from adapters.identity import AdapterDigest
from adapters.lent_pages import LentPage, LentPages


@dataclass(slots=True, kw_only=True)
class _Slot:
    """`reserved_until_s`: time until which an adapter that has not been pinned yet may not be evicted.

    `pages`: lent pages; if empty, the adapter uses the memory reserved for adapters.
    """

    num_bytes: int
    pages: tuple[LentPage, ...] = ()
    has_landed: bool = False
    pins: int = 0
    reserved_until_s: float = 0.0

    @property
    def own_bytes(self) -> int:
        """Bytes used of the memory reserved for adapters."""
        return 0 if self.pages else self.num_bytes


class DeviceSlots:
    """The slots of one device, bounded in number, in bytes and in pages. Not thread-safe: its owner holds a lock.

    Args:
        num_slots: at least 1; None for as many as `max_bytes` holds.
        max_bytes: bound on all adapters that do not use lent pages.

    Attributes:
        lacks_room: whether an adapter that could use lent pages was refused, or evicted another, for want of pages.
    """

    def __init__(self, num_slots: int | None, max_bytes: int, reserve_s: float = 1.0) -> None:
        self._num_slots = sys.maxsize if num_slots is None else num_slots
        self._max_bytes = max_bytes
        self._own_bytes = 0
        self._lent = LentPages()
        self.lacks_room = False
        self._reserve_s = reserve_s
        self._slot_by_digest: dict[AdapterDigest, _Slot] = {}
        # Those without a pin, least recently used first: hundreds may wait, and each looks for one in every step.
        self._unpinned: OrderedDict[AdapterDigest, _Slot] = OrderedDict()
        # Replaced on every change, so that other threads may read it and tell by its identity that it is the same.
        self._pinned: frozenset[AdapterDigest] = frozenset()

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._slot_by_digest

    def has_landed(self, digest: AdapterDigest) -> bool:
        """Tell whether the adapter's weights are on the device, ready for use."""
        slot = self._slot_by_digest.get(digest)
        return slot is not None and slot.has_landed

    @property
    def pinned(self) -> frozenset[AdapterDigest]:
        """The pinned adapters; any thread. The same object until an adapter is pinned first or unpinned last."""
        return self._pinned

    def pages(self, digest: AdapterDigest) -> tuple[LentPage, ...]:
        """Return the lent pages of the adapter's slot; empty if it uses adapter memory."""
        return self._slot_by_digest[digest].pages

    def try_take(
        self, digest: AdapterDigest, num_bytes: int, now_s: float, num_pages: int = 0
    ) -> list[AdapterDigest] | None:
        """Take a slot for an adapter that has none; return the adapters evicted for it, or None if there is no room.

        Args:
            num_pages: number of lent pages that the adapter needs; 0 if it cannot use lent pages.
        """
        evicted = self._victims(num_bytes, num_pages, now_s)
        if num_pages and evicted != [] and len(self._slot_by_digest) < self._num_slots:
            self.lacks_room = True
        if evicted is None:
            return None
        for victim in evicted:
            self._free(victim)
        is_own = self._own_bytes + num_bytes <= self._max_bytes
        slot = _Slot(num_bytes=num_bytes, pages=() if is_own else self._lent.take(num_pages))
        self._slot_by_digest[digest] = self._unpinned[digest] = slot
        self._own_bytes += slot.own_bytes
        return evicted

    def lend(self, run: range, num_pages: int) -> None:
        """Add the pages of a loan."""
        self._lent.add(run, num_pages)

    def give_back(self, now_s: float) -> tuple[range, list[AdapterDigest]] | None:
        """End a loan and evict the adapters in it; return None if every loan holds one that may not be evicted."""
        holders = [(digest, slot) for digest, slot in self._slot_by_digest.items() if slot.pages]
        stuck = {page.run for _, slot in holders if not _is_evictable(slot, now_s) for page in slot.pages}
        run = self._lent.emptiest(unless=stuck)
        if run is None:
            return None
        evicted = [digest for digest, slot in holders if any(page.run == run for page in slot.pages)]
        for digest in evicted:
            self._free(digest)
        self._lent.end(run)
        return run, evicted

    def land(self, digest: AdapterDigest, now_s: float) -> None:
        """Mark the weights as arrived; they are kept for at least `reserve_s` until the first pin."""
        slot = self._slot_by_digest[digest]
        slot.has_landed = True
        slot.reserved_until_s = now_s + self._reserve_s

    def pin(self, digest: AdapterDigest) -> None:
        """Pin a landed adapter: it is not evicted until `unpin`. Raise KeyError if it has not landed."""
        slot = self._slot_by_digest[digest]
        if not slot.has_landed:
            raise KeyError(f"adapter {digest} is not on the device")
        slot.pins += 1
        slot.reserved_until_s = 0.0
        if slot.pins == 1:
            self._pinned |= {digest}
            del self._unpinned[digest]

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo one `pin`. Raise KeyError if there is none."""
        slot = self._slot_by_digest[digest]
        if slot.pins < 1:
            raise KeyError(f"adapter {digest} is not pinned")
        slot.pins -= 1
        if not slot.pins:
            self._pinned -= {digest}
            self._unpinned[digest] = slot

    def drop(self, digest: AdapterDigest) -> None:
        """Free the slot of an adapter that has not landed; a landed one stays."""
        slot = self._slot_by_digest.get(digest)
        if slot is not None and not slot.has_landed:
            self._free(digest)

    def try_free(self, digest: AdapterDigest) -> bool:
        """Free the slot of an adapter, if it has one; return False if it is pinned or still loading."""
        slot = self._slot_by_digest.get(digest)
        if slot is None:
            return True
        if slot.pins or not slot.has_landed:
            return False
        self._free(digest)
        return True

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert len(self._slot_by_digest) <= self._num_slots
        slots = self._slot_by_digest.values()
        assert self._own_bytes == sum(slot.own_bytes for slot in slots) <= self._max_bytes
        self._lent.check(page for slot in slots for page in slot.pages)
        assert self._pinned == {digest for digest, slot in self._slot_by_digest.items() if slot.pins}
        assert self._unpinned.keys() == self._slot_by_digest.keys() - self._pinned
        for slot in slots:
            assert slot.pins >= 0
            assert slot.has_landed or slot.pins == 0

    def _victims(self, num_bytes: int, num_pages: int, now_s: float) -> list[AdapterDigest] | None:
        """Return the LRU adapters to evict to make room, or None if evicting all evictable ones is not enough."""
        num_left, bytes_left, pages_free = len(self._slot_by_digest), self._own_bytes, self._lent.num_free
        may_go = ((digest, slot) for digest, slot in self._unpinned.items() if _is_evictable(slot, now_s))
        victims: list[AdapterDigest] = []
        while num_left >= self._num_slots or (
            bytes_left + num_bytes > self._max_bytes and not 0 < num_pages <= pages_free
        ):
            digest, slot = next(may_go, (None, None))
            if digest is None or slot is None:
                return None
            victims.append(digest)
            num_left -= 1
            bytes_left -= slot.own_bytes
            pages_free += len(slot.pages)
        return victims

    def _free(self, digest: AdapterDigest) -> None:
        slot = self._slot_by_digest.pop(digest)
        del self._unpinned[digest]
        self._own_bytes -= slot.own_bytes
        self._lent.release(slot.pages)


def _is_evictable(slot: _Slot, now_s: float) -> bool:
    return slot.has_landed and slot.pins == 0 and slot.reserved_until_s <= now_s
