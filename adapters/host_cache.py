"""Adapters in host memory: loaded by threads of its own, least recently used out first, failures remembered a while.

Knows nothing of devices. Callers ask (`request`) and look (`get`); nothing waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights

_logger = logging.getLogger(__name__)

PASSING_S = 1.0
"""How long it is remembered that an adapter's files could not be had, once somebody has been told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    reason: str
    until_s: float
    passes: bool


class HostCache:
    """Adapter weights by digest, at most `max_bytes` together. Thread-safe.

    An entry that nobody has got yet keeps its place for `reserve_s`. Loads under way count as much as the mean of the
    entries, and a request for which they and those that keep their places leave no room is put off until it is
    repeated, so that a crowd of new adapters cannot push one another out. The bound is met by evicting after a load:
    it is passed for a moment by the adapters under way.

    Args:
        load: reads one adapter; called on a loader thread; raises AdapterError for an adapter at fault.
        on_change: called on a loader thread, without locks, when a load has ended in any way.
        failure_s: how long a failure is remembered before the adapter may be tried again.
    """

    def __init__(
        self,
        load: Callable[[AdapterDigest], AdapterWeights],
        *,
        max_bytes: int,
        num_threads: int = 2,
        failure_s: float = 10.0,
        reserve_s: float = 5.0,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._num_threads = num_threads
        self._failure_s = failure_s
        self._reserve_s = reserve_s
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        # Least recently used first.
        self._weights_by_digest: OrderedDict[AdapterDigest, AdapterWeights] = OrderedDict()
        # Those of them that nobody has got yet, by when they were loaded, the oldest first.
        self._loaded_s_by_digest: dict[AdapterDigest, float] = {}
        self._failure_by_digest: dict[AdapterDigest, _Failure] = {}
        self._loading: set[AdapterDigest] = set()
        self._num_bytes = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="adapter-load")

    def request(self, digest: AdapterDigest) -> None:
        """Start loading an adapter unless it is here, on its way, has just failed, or must wait for room."""
        with self._lock:
            if self._is_closed or digest in self._weights_by_digest or digest in self._loading:
                return
            if self._failure(digest) is not None or not self._has_room():
                return
            self._loading.add(digest)
            self._threads.submit(self._run, digest)

    def get(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter that is here, and make it the most recently used."""
        with self._lock:
            weights = self._weights_by_digest.get(digest)
            if weights is not None:
                self._loaded_s_by_digest.pop(digest, None)
                self._weights_by_digest.move_to_end(digest)
            return weights

    def peek(self, digest: AdapterDigest) -> AdapterWeights | None:
        """Return an adapter that is here; whoever only looks has not got it."""
        return self._weights_by_digest.get(digest)

    def error(self, digest: AdapterDigest) -> str | None:
        """Return why the last load failed, as long as that is remembered."""
        with self._lock:
            failure = self._failure(digest)
            if failure is None:
                return None
            if failure.passes:
                until_s = min(failure.until_s, self._clock() + PASSING_S)
                self._failure_by_digest[digest] = replace(failure, until_s=until_s)
            return failure.reason

    def passes(self, digest: AdapterDigest) -> bool:
        """Tell whether what `error` tells is no fault of the adapter's and may soon be over."""
        with self._lock:
            failure = self._failure(digest)
            return failure is not None and failure.passes

    def fail(self, digest: AdapterDigest, reason: str, *, passes: bool = False) -> None:
        """Remember for a while that an adapter cannot be used, with one sentence for the client."""
        # Also of one that passes: who waits for the adapter asks between steps, and one may take seconds.
        until_s = self._clock() + self._failure_s
        with self._lock:
            self._loading.discard(digest)
            self._failure_by_digest[digest] = _Failure(reason=reason, until_s=until_s, passes=passes)

    def forget_failure(self, digest: AdapterDigest) -> None:
        """Allow a failed adapter to be tried again at once."""
        with self._lock:
            self._failure_by_digest.pop(digest, None)

    def drop(self, digest: AdapterDigest) -> int:
        """Let go of an adapter, if it is here; return its bytes."""
        with self._lock:
            return self._remove(digest)

    def places(self) -> dict[AdapterDigest, str]:
        """Return "host" for each adapter that is here and "loading" for each on its way."""
        with self._lock:
            return dict.fromkeys(self._loading, "loading") | dict.fromkeys(self._weights_by_digest, "host")

    @property
    def num_bytes(self) -> int:
        """Host memory held, in bytes."""
        return self._num_bytes

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self._weights_by_digest

    def __len__(self) -> int:
        return len(self._weights_by_digest)

    def close(self) -> None:
        """Drop everything and end the threads once the loads under way are done; idempotent."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._weights_by_digest.clear()
            self._loaded_s_by_digest.clear()
            self._loading.clear()
            self._num_bytes = 0

    def _run(self, digest: AdapterDigest) -> None:
        """Load one adapter on a loader thread. This is the thread's border: no exception may pass it unseen."""
        try:
            weights = self._load(digest)
        except AdapterError as error:
            self.fail(digest, str(error), passes=isinstance(error, AdapterUnavailableError))
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
            self._weights_by_digest[digest] = weights
            self._loaded_s_by_digest[digest] = self._clock()
            self._num_bytes += weights.num_bytes
            self._evict(keep=digest)

    def _evict(self, keep: AdapterDigest) -> None:
        """Evict the least recently used until the bound holds, or only the newest and the reserved are left."""
        reserved = self._reserved()
        for digest in list(self._weights_by_digest):
            if self._num_bytes <= self._max_bytes:
                return
            if digest != keep and digest not in reserved:
                self._remove(digest)

    def _remove(self, digest: AdapterDigest) -> int:
        """Let go of an entry, if there is one; return its bytes."""
        weights = self._weights_by_digest.pop(digest, None)
        self._loaded_s_by_digest.pop(digest, None)
        freed = 0 if weights is None else weights.num_bytes
        self._num_bytes -= freed
        return freed

    def _has_room(self) -> bool:
        """Tell whether one more adapter finds room beside those that may not be evicted."""
        num_loading, num_entries = len(self._loading), len(self._weights_by_digest)
        if not num_entries:
            # How much each takes is known with the first of them.
            return num_loading < self._num_threads
        reserved = self._reserved()
        if not reserved and not num_loading:
            return True
        kept_bytes = sum(self._weights_by_digest[digest].num_bytes for digest in reserved)
        return kept_bytes + (num_loading + 1) * self._num_bytes / num_entries <= self._max_bytes

    def _reserved(self) -> Collection[AdapterDigest]:
        """Return the entries that nobody has got yet and that are not old; the lock is held."""
        now_s = self._clock()
        while self._loaded_s_by_digest:
            digest, loaded_s = next(iter(self._loaded_s_by_digest.items()))
            if now_s - loaded_s < self._reserve_s:
                break
            del self._loaded_s_by_digest[digest]
        return self._loaded_s_by_digest.keys()

    def _failure(self, digest: AdapterDigest) -> _Failure | None:
        """Return a failure that is still remembered; the lock is held."""
        failure = self._failure_by_digest.get(digest)
        if failure is not None and failure.until_s <= self._clock():
            del self._failure_by_digest[digest]
            return None
        return failure
