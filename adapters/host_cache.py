"""Adapters in host memory: loaded by threads of its own, least recently used out first, failures remembered a while.

Knows nothing of devices. Callers ask (`request`) and look (`get`); nothing waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from adapters.errors import AdapterError
from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """`is_taken`: somebody has got it since it was loaded; before that it is evicted only when it grows old."""

    weights: AdapterWeights
    loaded_s: float
    is_taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    reason: str
    until_s: float


class HostCache:
    """Adapter weights by digest, at most `max_entries` of them and `max_bytes` together. Thread-safe.

    Entries and loads under way count together, and an entry that nobody has got yet keeps its place for `reserve_s`:
    a request beyond that is put off until it is repeated, so that a crowd of new adapters cannot push one another out.
    The byte bound is met by evicting after a load: it is passed for a moment by the adapters under way.

    Args:
        load: reads one adapter; called on a loader thread; raises AdapterError for an adapter at fault.
        on_change: called on a loader thread, without locks, when a load has ended in any way.
        failure_s: how long a failure is remembered before the adapter may be tried again.
    """

    def __init__(
        self,
        load: Callable[[AdapterDigest], AdapterWeights],
        *,
        max_entries: int,
        max_bytes: int,
        num_threads: int = 2,
        failure_s: float = 10.0,
        reserve_s: float = 5.0,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._failure_s = failure_s
        self._reserve_s = reserve_s
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._entry_by_digest: OrderedDict[AdapterDigest, _Entry] = OrderedDict()
        self._failure_by_digest: dict[AdapterDigest, _Failure] = {}
        self._loading: set[AdapterDigest] = set()
        self._num_bytes = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="adapter-load")

    def request(self, digest: AdapterDigest) -> None:
        """Start loading an adapter unless it is here, on its way, has just failed, or must wait for room."""
        with self._lock:
            if self._is_closed or digest in self._entry_by_digest or digest in self._loading:
                return
            if self._failure(digest) is not None:
                return
            now_s = self._clock()
            num_kept = sum(not self._is_evictable(entry, now_s) for entry in self._entry_by_digest.values())
            if num_kept + len(self._loading) >= self._max_entries:
                return
            self._loading.add(digest)
            self._threads.submit(self._run, digest)

    def get(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter that is here, and make it the most recently used."""
        with self._lock:
            entry = self._entry_by_digest.get(digest)
            if entry is None:
                return None
            entry.is_taken = True
            self._entry_by_digest.move_to_end(digest)
            return entry.weights

    def peek(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter that is here; whoever only looks has not got it."""
        with self._lock:
            entry = self._entry_by_digest.get(digest)
            return None if entry is None else entry.weights

    def error(self, digest: AdapterDigest) -> str | None:
        """Return why the last load failed, as long as that is remembered."""
        with self._lock:
            failure = self._failure(digest)
            return None if failure is None else failure.reason

    def fail(self, digest: AdapterDigest, reason: str) -> None:
        """Remember for a while that an adapter cannot be used, with one sentence for the client."""
        with self._lock:
            self._loading.discard(digest)
            self._failure_by_digest[digest] = _Failure(reason=reason, until_s=self._clock() + self._failure_s)

    def forget_failure(self, digest: AdapterDigest) -> None:
        """Allow a failed adapter to be tried again at once."""
        with self._lock:
            self._failure_by_digest.pop(digest, None)

    def drop(self, digest: AdapterDigest) -> int:
        """Let go of an adapter, if it is here; return its bytes."""
        with self._lock:
            entry = self._entry_by_digest.pop(digest, None)
            freed = 0 if entry is None else entry.weights.num_bytes
            self._num_bytes -= freed
            return freed

    def places(self) -> dict[AdapterDigest, str]:
        """Return "host" for each adapter that is here and "loading" for each on its way."""
        with self._lock:
            return dict.fromkeys(self._loading, "loading") | dict.fromkeys(self._entry_by_digest, "host")

    @property
    def num_bytes(self) -> int:
        """Host memory held, in bytes."""
        return self._num_bytes

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._entry_by_digest

    def __len__(self) -> int:
        return len(self._entry_by_digest)

    def close(self) -> None:
        """Drop everything and end the threads once the loads under way are done; idempotent."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._entry_by_digest.clear()
            self._loading.clear()
            self._num_bytes = 0

    def _run(self, digest: AdapterDigest) -> None:
        """Load one adapter on a loader thread. This is the thread's border: no exception may pass it unseen."""
        try:
            weights = self._load(digest)
        except AdapterError as error:
            self.fail(digest, str(error))
        except Exception:
            _logger.exception("loading adapter %s failed", digest)
            self.fail(digest, "The adapter could not be loaded.")
        else:
            self._insert(digest, weights)
        self._on_change()

    def _insert(self, digest: AdapterDigest, weights: AdapterWeights) -> None:
        with self._lock:
            self._loading.discard(digest)
            if self._is_closed:
                return
            self._entry_by_digest[digest] = _Entry(weights=weights, loaded_s=self._clock())
            self._num_bytes += weights.num_bytes
            self._evict(keep=digest)

    def _evict(self, keep: AdapterDigest) -> None:
        """Evict the least recently used until the bounds hold, or only the newest and the reserved are left."""
        now_s = self._clock()
        for digest in list(self._entry_by_digest):
            if len(self._entry_by_digest) <= self._max_entries and self._num_bytes <= self._max_bytes:
                return
            if digest != keep and self._is_evictable(self._entry_by_digest[digest], now_s):
                self._num_bytes -= self._entry_by_digest.pop(digest).weights.num_bytes

    def _failure(self, digest: AdapterDigest) -> _Failure | None:
        """Return a failure that is still remembered; the lock is held."""
        failure = self._failure_by_digest.get(digest)
        if failure is not None and failure.until_s <= self._clock():
            del self._failure_by_digest[digest]
            return None
        return failure

    def _is_evictable(self, entry: _Entry, now_s: float) -> bool:
        return entry.is_taken or now_s - entry.loaded_s >= self._reserve_s
