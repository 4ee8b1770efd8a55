"""LRU cache of adapters in host memory, loaded by its own thread pool; failures are remembered for a while.

Knows nothing of devices. Callers start a load (`request`) and poll (`get`); neither blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from adapters.errors import AdapterError, AdapterGoneError, AdapterUnavailableError
from adapters.identity import AdapterDigest
from adapters.loads import AdapterLoads
from adapters.weights import AdapterWeights

_logger = logging.getLogger(__name__)

NUM_THREADS = 2
FAILURE_S = 10.0
"""How long a failure is remembered before the adapter may be tried again."""
RESERVE_S = 5.0
PASSING_S = 1.0
"""How long a transient failure is still remembered once a caller has read it (`error`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedLoad:
    reason: str
    until_s: float
    passes: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """`num_bytes`: remembered, as `weights.host_bytes` adds up all tensors."""

    weights: AdapterWeights
    num_bytes: int


class HostCache:
    """Adapter weights by digest, at most `max_bytes` in total. Thread-safe.

    A new entry is reserved until its first `get`, for at most `RESERVE_S`. A load in progress counts as the mean size
    of the entries. If loads, reserved and held entries leave no room for a request, it is ignored and the caller must
    repeat it, so that many new adapters cannot evict one another. Eviction happens after a load, so the adapters being
    loaded may briefly exceed the bound.

    Of callers that repeat their requests by turns, the first gets the room that comes: requests ahead of need are
    ignored while others wait for room. It comes in the end, unless the held entries leave none (`waits_for_held`).

    Args:
        load: reads one adapter; called on a loader thread; raises AdapterError for a faulty adapter.
        on_change: called on a loader thread, without locks, when a load has succeeded or failed.
        held: returns entries whose memory others use, so that evicting them would free nothing; called with this
            object's lock held. While they are the same, it had better return the same object: their bytes are then
            not added up again for each request.
    """

    def __init__(
        self,
        load: Callable[[AdapterDigest], AdapterWeights],
        *,
        max_bytes: int,
        on_change: Callable[[], None] = lambda: None,
        held: Callable[[], frozenset[AdapterDigest]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._held = held
        self._clock = clock
        self._lock = threading.Lock()
        # Least recently used first.
        self._entry_by_digest: OrderedDict[AdapterDigest, _Entry] = OrderedDict()
        # Load times of entries that no `get` has returned yet, the oldest first, and the bytes of these.
        self._loaded_s_by_digest: dict[AdapterDigest, float] = {}
        self._reserved_bytes = 0
        # What `held` returned when its bytes were last added up; None if entries have come or gone since.
        self._counted: frozenset[AdapterDigest] | None = None
        self._counted_bytes = 0
        self._failure_by_digest: dict[AdapterDigest, _FailedLoad] = {}
        self._loading: set[AdapterDigest] = set()
        # Loads in progress that may be reading files from before a repair, so that their failure means nothing.
        self._outdated: set[AdapterDigest] = set()
        # Loads in progress of adapters that were dropped, and not requested since.
        self._dropped: set[AdapterDigest] = set()
        self._num_bytes = 0
        self.loads = AdapterLoads()
        self._is_closed = False
        # Whether a request was refused for want of room since one was last granted.
        self._has_refused = False
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="adapter-load")

    def request(self, digest: AdapterDigest, *, is_ahead: bool = False) -> None:
        """Start loading an adapter unless it is cached, loading, has just failed, or must wait for room.

        Args:
            is_ahead: it is not needed yet.
        """
        with self._lock:
            self._dropped.discard(digest)
            if self._is_closed or digest in self._entry_by_digest or digest in self._loading:
                return
            if self._failure(digest) is not None or (is_ahead and self._has_refused):
                return
            if not self._has_room():
                self._has_refused = self._has_refused or not is_ahead
                return
            self._has_refused = False
            self._loading.add(digest)
            self._threads.submit(self._run, digest)

    def waits_for_held(self, digest: AdapterDigest) -> bool:
        """Tell whether an adapter is neither cached nor loading, and finds no room before held entries are let go."""
        with self._lock:
            if digest in self._entry_by_digest or digest in self._loading:
                return False
            return not self._fits(self._held_bytes(), num_loading=0)

    def get(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter if it is cached, and make it the most recently used."""
        with self._lock:
            entry = self._entry_by_digest.get(digest)
            if entry is None:
                return None
            self._end_reservation(digest)
            self._entry_by_digest.move_to_end(digest)
            return entry.weights

    def peek(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter if it is cached, without changing its reservation or its LRU position."""
        entry = self._entry_by_digest.get(digest)
        return None if entry is None else entry.weights

    def error(self, digest: AdapterDigest) -> str | None:
        """Return why the last load failed, while that is remembered."""
        with self._lock:
            failure = self._failure(digest)
            if failure is None:
                return None
            if failure.passes:
                until_s = min(failure.until_s, self._clock() + PASSING_S)
                self._failure_by_digest[digest] = replace(failure, until_s=until_s)
            return failure.reason

    def passes(self, digest: AdapterDigest) -> bool:
        """Tell whether the failure that `error` returns is transient and not the adapter's fault."""
        with self._lock:
            failure = self._failure(digest)
            return failure is not None and failure.passes

    def fail(self, digest: AdapterDigest, reason: str) -> None:
        """Remember for `FAILURE_S` that an adapter cannot be used; `reason` is one sentence for the client."""
        with self._lock:
            self._remember(digest, reason, passes=False)

    def forget_failure(self, digest: AdapterDigest) -> None:
        """Allow a failed adapter to be tried again at once, also if it is being loaded and that fails."""
        with self._lock:
            self._failure_by_digest.pop(digest, None)
            if digest in self._loading:
                self._outdated.add(digest)

    def drop(self, digest: AdapterDigest) -> int:
        """Remove an adapter, if it is cached or being loaded; return the bytes freed."""
        with self._lock:
            if digest in self._loading:
                self._dropped.add(digest)
            return self._remove(digest)

    def places(self) -> dict[AdapterDigest, str]:
        """Return "host" for each cached adapter and "loading" for each load in progress."""
        with self._lock:
            return dict.fromkeys(self._loading, "loading") | dict.fromkeys(self._entry_by_digest, "host")

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._entry_by_digest

    def close(self) -> None:
        """Drop everything and end the threads once the loads in progress are done; idempotent."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for digest in list(self._entry_by_digest):
                self._remove(digest)
            self._loading.clear()
            self._outdated.clear()
            self._dropped.clear()

    def _run(self, digest: AdapterDigest) -> None:
        """Load one adapter on a loader thread. The thread ends here: no exception may escape unlogged."""
        started_s = self._clock()
        try:
            weights = self._load(digest)
        except AdapterGoneError:
            # No failure: by now, others may want it.
            with self._lock:
                self._end_load(digest)
        except AdapterError as error:
            self._fail_load(digest, str(error), passes=isinstance(error, AdapterUnavailableError))
        except Exception as error:
            _logger.exception("loading adapter %s failed", digest)
            # A disk that fails now may work again, unlike a bug.
            self._fail_load(digest, "The adapter could not be loaded.", passes=isinstance(error, OSError))
        else:
            self._insert(digest, weights, self._clock() - started_s)
        self._on_change()

    def _fail_load(self, digest: AdapterDigest, reason: str, *, passes: bool) -> None:
        """Remember that a load has failed, unless its failure was forgotten meanwhile: whoever waits asks again."""
        with self._lock:
            self.loads.num_failed += 1
            if not self._end_load(digest):
                self._remember(digest, reason, passes=passes)

    def _remember(self, digest: AdapterDigest, reason: str, *, passes: bool) -> None:
        """Remember a failure; the lock is held."""
        # As long if it is transient: waiting requests poll between steps, and a step may take seconds.
        until_s = self._clock() + FAILURE_S
        self._failure_by_digest[digest] = _FailedLoad(reason=reason, until_s=until_s, passes=passes)

    def _end_load(self, digest: AdapterDigest) -> bool:
        """Note the end of a load and return whether it was outdated; the lock is held."""
        is_outdated = digest in self._outdated
        self._loading.discard(digest)
        self._outdated.discard(digest)
        self._dropped.discard(digest)
        return is_outdated

    def _insert(self, digest: AdapterDigest, weights: AdapterWeights, took_s: float) -> None:
        with self._lock:
            is_dropped = digest in self._dropped
            self._end_load(digest)
            if self._is_closed or is_dropped:
                return
            entry = self._entry_by_digest[digest] = _Entry(weights, weights.host_bytes)
            self.loads.add(entry.num_bytes, took_s)
            self._loaded_s_by_digest[digest] = self._clock()
            self._reserved_bytes += entry.num_bytes
            self._num_bytes += entry.num_bytes
            self._counted = None
            self._evict(keep=digest)

    def _evict(self, keep: AdapterDigest) -> None:
        """Evict in LRU order until the bound holds, or only `keep`, held and reserved entries are left.

        The lock is held.
        """
        self._end_old_reservations()
        held = self._held()
        for digest in list(self._entry_by_digest):
            if self._num_bytes <= self._max_bytes:
                return
            if digest != keep and digest not in held and digest not in self._loaded_s_by_digest:
                self._remove(digest)

    def _remove(self, digest: AdapterDigest) -> int:
        """Remove an entry, if there is one; return the bytes freed; the lock is held."""
        self._end_reservation(digest)
        entry = self._entry_by_digest.pop(digest, None)
        if entry is None:
            return 0
        self._num_bytes -= entry.num_bytes
        self._counted = None
        return entry.num_bytes

    def _has_room(self) -> bool:
        """Tell whether one more adapter fits beside the loads, the held and the reserved entries; the lock is held."""
        num_loading = len(self._loading)
        if not self._entry_by_digest:
            # No entry yet from which to estimate the size of a load.
            return num_loading < NUM_THREADS
        self._end_old_reservations()
        return self._fits(self._reserved_bytes + self._held_bytes(), num_loading)

    def _fits(self, kept_bytes: int, num_loading: int) -> bool:
        """Tell whether one more adapter fits beside these; alone it always does; the lock is held."""
        if not kept_bytes and not num_loading:
            return True
        mean_bytes = self._num_bytes / max(1, len(self._entry_by_digest))
        return kept_bytes + (num_loading + 1) * mean_bytes <= self._max_bytes

    def _held_bytes(self) -> int:
        """Return the bytes of the held entries; the lock is held."""
        held = self._held()
        if held is not self._counted:
            self._counted = held
            self._counted_bytes = sum(
                entry.num_bytes for digest in held if (entry := self._entry_by_digest.get(digest)) is not None
            )
        return self._counted_bytes

    def _end_reservation(self, digest: AdapterDigest) -> None:
        """End the reservation of an entry, if it has one; the lock is held."""
        if self._loaded_s_by_digest.pop(digest, None) is not None:
            self._reserved_bytes -= self._entry_by_digest[digest].num_bytes

    def _end_old_reservations(self) -> None:
        """End the reservations that have lasted for `RESERVE_S`; the lock is held."""
        until_s = self._clock() - RESERVE_S
        while self._loaded_s_by_digest:
            digest, loaded_s = next(iter(self._loaded_s_by_digest.items()))
            if loaded_s > until_s:
                return
            self._end_reservation(digest)

    def _failure(self, digest: AdapterDigest) -> _FailedLoad | None:
        """Return the failure if it is still remembered; the lock is held."""
        failure = self._failure_by_digest.get(digest)
        if failure is not None and failure.until_s <= self._clock():
            del self._failure_by_digest[digest]
            return None
        return failure
