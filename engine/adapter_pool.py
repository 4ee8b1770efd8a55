"""Adapter residency: load adapters from disk through host memory into device slots, in the background.

    declared --(loader threads)--> host cache --(try_pin: a slot)--> device, pinned by running requests

Any number of adapters may be declared; the host cache and the slots bound memory. On a CPU the device weights are the
host's and taking a slot costs nothing; on a GPU a thread copies from page-locked memory on its own CUDA stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import torch

from adapters.device_slots import DeviceSlots
from adapters.errors import AdapterError, AdapterGoneError, AdapterUnavailableError
from adapters.host_cache import HostCache
from adapters.identity import AdapterDigest, AdapterRef
from adapters.loading import AdapterLoader
from adapters.loads import AdapterLoads
from adapters.weights import AdapterWeights
from engine.config import ResolvedConfig
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.gpu.tabled_adapter import PinnedAdapter, TabledAdapter

_logger = logging.getLogger(__name__)

Locate = Callable[[AdapterRef], AdapterRef]
LentMemory = Callable[[range], Sequence[torch.Tensor]]


class AdapterPool:
    """The adapters of one engine; an `engine.ports.AdapterGate`.

    Thread-safe. No method blocks or accesses a disk, except `close`.

    Args:
        loader: used on background threads.
        lent_memory: returns the pages of a run of KV cache blocks as bytes, all of one size. A copy into them waits
            for the work that the device has already been given.
        locate: returns a reference to files on this node, or raises AdapterError; called on a background thread.
        on_change: called on a background thread when an adapter is loaded, usable or failed: a waiting request may
            now run, or must be ended.
    """

    def __init__(
        self,
        refs: Iterable[AdapterRef],
        loader: AdapterLoader,
        config: ResolvedConfig,
        device: torch.device,
        *,
        lent_memory: LentMemory = lambda run: [],
        locate: Locate = lambda ref: ref,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._device = device
        self._lent_memory = lent_memory
        self._pages_by_run: dict[range, Sequence[torch.Tensor]] = {}
        self._locate = locate
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.RLock()
        # Names may have the same content in folders of their own; the one to read first comes first.
        self._refs_by_digest: dict[AdapterDigest, tuple[AdapterRef, ...]] = {}
        self._weights_by_digest: dict[AdapterDigest, AdapterWeights] = {}
        self._max_bytes = config.max_device_adapter_bytes
        self._slots = DeviceSlots(config.max_device_adapters, self._max_bytes)
        self._is_copied = device.type == "cuda"
        self._host = HostCache(
            self._load,
            max_bytes=config.max_host_adapter_bytes,
            on_change=self._note_change,
            held=frozenset if self._is_copied else lambda: self._slots.pinned,
            clock=clock,
        )
        self._uploads: ThreadPoolExecutor | None = None
        if self._is_copied:
            self._uploads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-upload")
            self._stream = torch.cuda.Stream(device)
        for ref in refs:
            self.declare(ref)

    def declare(self, ref: AdapterRef) -> None:
        """Declare an adapter without loading it. Two names for the same content share everything."""
        with self._lock:
            self._put_first(ref)
        self._host.forget_failure(ref.digest)

    def learn(self, ref: AdapterRef) -> None:
        """Declare an adapter unless it is known under the same path; if its files have moved, use the new path, too."""
        with self._lock:
            known = self._refs_by_digest.get(ref.digest, ())
        # With the same files a remembered failure must stand: they would fail again.
        if all(other.path != ref.path for other in known):
            self.declare(ref)

    def forget_failure(self, digest: AdapterDigest) -> None:
        """Let an adapter be tried again at once: the files that could not be used have been replaced."""
        self._host.forget_failure(digest)

    def release(self, digest: AdapterDigest) -> int | None:
        """Forget an adapter; return the bytes freed, or None if it is still pinned or being copied to the device."""
        with self._lock:
            self._refs_by_digest.pop(digest, None)
            if not self._slots.try_free(digest):
                return None
            on_device = self._weights_by_digest.pop(digest, None)
            freed = self._host.drop(digest)
            if on_device is not None and self._is_copied:
                freed += on_device.num_bytes
            return freed

    def places(self) -> dict[AdapterDigest, str]:
        """Return the place of each adapter in memory or on its way there: "device", "host" or "loading"."""
        with self._lock:
            return self._host.places() | dict.fromkeys(self._weights_by_digest, "device")

    def prepare(self, digest: AdapterDigest) -> None:
        """Start loading the adapter into host memory, unless others that are tried to be pinned wait for room there."""
        with self._lock:
            if digest in self._refs_by_digest and digest not in self._slots:
                self._host.request(digest, is_ahead=True)

    def try_pin(self, digest: AdapterDigest) -> bool:
        """Pin the adapter on the device for one running request; return False if it is loading or no slot is free."""
        with self._lock:
            if digest not in self._slots and not self._try_place(digest):
                return False
            if not self._slots.has_landed(digest):
                return False
            self._slots.pin(digest)
            if not self._is_copied:
                # One memory, in which an adapter must not look unused while requests use it.
                self._host.get(digest)
            return True

    def swap_s(self, digest: AdapterDigest) -> float:
        """Return the average load time, 0 for an adapter that is on the device or in host memory."""
        with self._lock:
            return 0.0 if digest in self._slots or digest in self._host else self.loads.average_s

    def waits_for_slot(self, digest: AdapterDigest) -> bool:
        """Return whether the adapter is in host memory but has no device slot, or finds no room beside the pinned ones.

        The second happens on a CPU, where the pinned ones are in host memory.
        """
        with self._lock:
            return digest not in self._slots and (digest in self._host or self._host.waits_for_held(digest))

    def lacked_room(self) -> bool:
        """Return whether, since the last call, an adapter needed more device memory than was free."""
        with self._lock:
            lacked, self._slots.lacks_room = self._slots.lacks_room, False
            return lacked

    def lend(self, run: range) -> None:
        """Let adapters use a run of KV cache blocks."""
        with self._lock:
            self._pages_by_run[run] = self._lent_memory(run)
            self._slots.lend(run, len(self._pages_by_run[run]))

    def give_back(self) -> range | None:
        """Evict the adapters from a lent run and return it; None if every run holds one that cannot be evicted."""
        with self._lock:
            ended = self._slots.give_back(self._clock())
            if ended is None:
                return None
            run, evicted = ended
            self._forget(evicted)
            del self._pages_by_run[run]
            return run

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo one `try_pin` that returned True."""
        with self._lock:
            self._slots.unpin(digest)

    def error(self, digest: AdapterDigest) -> str | None:
        """Return why the adapter cannot become resident, or None; a failure is forgotten after some seconds."""
        with self._lock:
            if digest not in self._refs_by_digest:
                return "The adapter is not declared on this replica."
        return self._host.error(digest)

    def passes(self, digest: AdapterDigest) -> bool:
        """Return whether the failure that `error` reports is transient: its files are unavailable for now."""
        return self._host.passes(digest)

    def weights(self, digest: AdapterDigest) -> AdapterWeights:
        """Return the device weights of a pinned adapter; they are valid until it is unpinned.

        Raises:
            EngineError: the adapter is not on the device.
        """
        weights = self._weights_by_digest.get(digest)
        if weights is None:
            raise EngineError(f"adapter {digest} runs in a batch without being on the device")
        return weights

    @property
    def loads(self) -> AdapterLoads:
        """The loads into host memory so far."""
        return self._host.loads

    def num_resident(self) -> int:
        """Return how many adapters are usable on the device now."""
        return len(self._weights_by_digest)

    def close(self) -> None:
        """Stop the threads and release all weights; the engine must have stopped."""
        self._host.close()
        if self._uploads is not None:
            self._uploads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._weights_by_digest.clear()

    def _load(self, digest: AdapterDigest) -> AdapterWeights:
        """Load an adapter; called on a loader thread."""
        ref, weights = self._read(self._declared(digest))
        if weights.num_bytes > self._max_bytes:
            reason = (
                f"it takes {weights.num_bytes} bytes, more than the {self._max_bytes} that the device has for adapters"
            )
            raise AdapterError(ref.name, reason)
        kept = cast("TabledAdapter", weights).pinned() if self._is_copied else weights
        self._declared(digest)
        return kept

    def _read(self, refs: Sequence[AdapterRef]) -> tuple[AdapterRef, AdapterWeights]:
        """Read a content from the first folder that still has it: what one name has lost, another may have."""
        failure: AdapterError | None = None
        for ref in refs:
            try:
                weights = self._loader.load(self._locate(ref))
            except AdapterError as error:
                if failure is None or isinstance(error, AdapterUnavailableError):
                    failure = error
                continue
            with self._lock:
                if failure is not None and ref.digest in self._refs_by_digest:
                    self._put_first(ref)
            return ref, weights
        assert failure is not None
        raise failure

    def _put_first(self, ref: AdapterRef) -> None:
        """Let a content be read from this reference's folder before the others; the caller holds the lock."""
        others = (other for other in self._refs_by_digest.get(ref.digest, ()) if other.path != ref.path)
        self._refs_by_digest[ref.digest] = (ref, *others)

    def _declared(self, digest: AdapterDigest) -> tuple[AdapterRef, ...]:
        """Return the references to an adapter, or raise AdapterGoneError if it has been released."""
        with self._lock:
            refs = self._refs_by_digest.get(digest)
        if refs is None:
            raise AdapterGoneError(digest[:12], "it was unloaded before it was read")
        return refs

    def _try_place(self, digest: AdapterDigest) -> bool:
        """Give a slot to an adapter that has none, evicting others if necessary; the caller holds the lock."""
        host = self._host.peek(digest)
        if host is None:
            if digest in self._refs_by_digest:
                self._host.request(digest)
            return False
        evicted = self._slots.try_take(digest, host.num_bytes, self._clock(), host.num_pages)
        if evicted is None:
            return False
        # Only now: `get` ends the reservation in the host cache, which must last until the adapter has a slot.
        self._host.get(digest)
        self._forget(evicted)
        pages = [self._pages_by_run[page.run][page.number] for page in self._slots.pages(digest)]
        if self._uploads is None:
            self._land(digest, _tabled(host).to(self._device, pages) if pages else host)
        else:
            self._uploads.submit(self._upload, digest, host, pages)
        return True

    def _note_change(self) -> None:
        """After a load, which may have evicted adapters from host memory: on a CPU their slots hold the same memory."""
        if not self._is_copied:
            with self._lock:
                gone = [digest for digest in self._weights_by_digest if digest not in self._host]
                self._forget([digest for digest in gone if self._slots.try_free(digest)])
        self._on_change()

    def _forget(self, evicted: Sequence[AdapterDigest]) -> None:
        for victim in evicted:
            del self._weights_by_digest[victim]

    def _land(self, digest: AdapterDigest, weights: AdapterWeights) -> None:
        with self._lock:
            self._weights_by_digest[digest] = weights
            self._slots.land(digest, self._clock())

    def _upload(self, digest: AdapterDigest, host: AdapterWeights, pages: Sequence[torch.Tensor]) -> None:
        """Copy to the GPU on the upload thread, on its own stream; the forward pass does not wait for it."""
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if pages:
                    # Steps already launched may still read the previous content.
                    self._stream.wait_stream(torch.cuda.default_stream(self._device))
                try:
                    weights = _tabled(host).to(self._device, pages)
                    # Allocated on this stream, but read on the engine's.
                    weights.keep_for(torch.cuda.default_stream(self._device))
                finally:
                    # On an error, too: others may get the pages then.
                    self._stream.synchronize()
        except Exception:
            # Last resort of the thread: otherwise the slot would stay in flight and its requests wait forever.
            _logger.exception("copying adapter %s to %s failed", digest, self._device)
            self._host.fail(digest, "The adapter could not be copied to the device.")
            with self._lock:
                self._slots.drop(digest)
        else:
            self._land(digest, weights)
        self._on_change()


def _tabled(weights: AdapterWeights) -> TabledAdapter | PinnedAdapter:
    """Return weights that a GPU uses by their own type: the loader has laid them out for it."""
    return cast("TabledAdapter | PinnedAdapter", weights)
