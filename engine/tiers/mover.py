"""Copy blocks to the tiers below the device's cache and back, on background threads.

Copies run beside the device's steps, and it is learned how long a block of each tier takes to be fetched.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from engine.cache.blocks import BlockId
from engine.kv_cache import KvCache
from engine.ports import BlockOrder, KeptBlock
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots

_logger = logging.getLogger(__name__)

SlotStore = HostSlots | DiskSlots
"""A tier: slots of one block each. `write` is called on one thread, neither beside a `read` of the same slot."""

COPIED_AT_ONCE_BYTES = 32 << 20
"""Host memory of one copy in flight; the device needs as much for it."""
NEW_SHARE = 0.2
"""Weight of the newest measurement in the expected time per block."""
MAX_SURPRISE = 4.0
"""A measurement counts as at most this many times the expected time: a disk may have been asleep."""
HALVING_S = 10.0
"""Half-life of the expected time: without new fetches, nothing else would correct an estimate that is too high."""


class TierMover:
    """An `engine.ports.BlockMover`.

    Args:
        tiers: the nearest to the device first.
        on_done: called on a background thread when blocks have been copied: a request may be able to run, or more
            blocks may be copied.
    """

    def __init__(
        self, cache: KvCache, tiers: Sequence[SlotStore], device: torch.device, on_done: Callable[[], None]
    ) -> None:
        self.capacities: Sequence[int] = [tier.num_slots for tier in tiers]
        self._tiers = tiers
        self._device = device
        self._on_done = on_done
        self._num_at_once = max(1, COPIED_AT_ONCE_BYTES // cache.block_bytes)
        # Number of `abandon` calls per block: a store is dropped if it has changed by the time the block is read.
        self._lives = [0] * cache.null_block
        self._stored: deque[tuple[BlockOrder, bool]] = deque()
        self._fetched: deque[tuple[int, int]] = deque()
        self._times = [BlockTime() for _ in tiers]
        self._given_up: set[int] = set()
        # Held while blocks are written: once `give_up` returns, nothing more is written for that fetch.
        self._writing = threading.Lock()
        self._is_closing = self._has_complained = False
        # A thread each: stores must not delay fetches, for which requests wait, nor a disk what is in host memory.
        self._down, self._up = ([CacheBytes(cache, device) for _ in tiers] for _ in range(2))
        self._storing, self._fetching = (
            [ThreadPoolExecutor(1, f"kv-tier-{way}-{number}") for number in range(len(tiers))]
            for way in ("store", "fetch")
        )

    def contents(self) -> Sequence[Sequence[KeptBlock]]:
        """Return what each tier held at the start."""
        return [tier.contents() for tier in self._tiers]

    def store(self, orders: Sequence[BlockOrder]) -> None:
        """Enqueue copying blocks to their slots, in batches."""
        after = launched(self._device)
        for some in _cut(orders, self._num_at_once):
            lives = [self._lives[order.block] for order in some]
            self._storing[some[0].tier].submit(self._store, some, lives, after)

    def abandon(self, block: BlockId) -> None:
        """Invalidate copies of a block that has not been read yet."""
        self._lives[block] += 1

    def stored(self) -> list[tuple[BlockOrder, bool]]:
        """Return the finished stores."""
        return [self._stored.popleft() for _ in range(len(self._stored))]

    def fetch(self, ticket: int, orders: Sequence[BlockOrder]) -> None:
        """Enqueue filling blocks from their slots, in batches, behind other fetches from the same farthest tier."""
        self._fetching[max(order.tier for order in orders)].submit(self._fetch, ticket, orders, launched(self._device))

    def fetched(self) -> list[tuple[int, int]]:
        """Return the finished fetches."""
        found = [self._fetched.popleft() for _ in range(len(self._fetched))]
        # Here, as some are given up when they are done, but nobody has been told yet.
        self._given_up.difference_update(ticket for ticket, _ in found)
        return found

    def give_up(self, ticket: int) -> None:
        """Cancel a fetch: write nothing more for it."""
        with self._writing:
            self._given_up.add(ticket)

    def fetch_s(self, num_by_tier: Mapping[int, int]) -> float:
        """Return the expected time for so many blocks of each tier, from recent fetches."""
        return sum(count * self._times[tier].expected_s for tier, count in num_by_tier.items())

    def close(self) -> None:
        """Stop the threads after the copy in flight; the engine must have stopped."""
        self._is_closing = True
        for pool in (*self._storing, *self._fetching):
            pool.shutdown(wait=True, cancel_futures=True)
        for tier in self._tiers:
            tier.close()

    def _store(self, orders: Sequence[BlockOrder], lives: Sequence[int], after: torch.cuda.Event | None) -> None:
        were_written = [False] * len(orders)
        try:
            # Behind a slow disk, most may have been abandoned by now.
            fresh = [i for i, order in enumerate(orders) if lives[i] == self._lives[order.block]]
            contents = self._down[orders[0].tier].read([orders[i].block for i in fresh], after) if fresh else ()
            for i, content in zip(fresh, contents, strict=True):
                # Checked after the read: the content of a block abandoned before that may be partly overwritten.
                were_written[i] = lives[i] == self._lives[orders[i].block] and self._write(orders[i], content)
        except Exception:
            # Last resort of the thread: otherwise the slots would stay in flight forever.
            _logger.exception("copying blocks of the KV cache to a tier failed")
        self._stored.extend(zip(orders, were_written, strict=True))
        self._on_done()

    def _write(self, order: BlockOrder, content: torch.Tensor) -> bool:
        if self._is_closing:
            return False
        try:
            self._tiers[order.tier].write(order.slot, order.name, order.depth, content)
        except OSError as error:
            if not self._has_complained:
                _logger.warning("the KV cache's tier on disk cannot be written and keeps what it has: %s", error)
            self._has_complained = True
            return False
        return True

    def _fetch(self, ticket: int, orders: Sequence[BlockOrder], after: torch.cuda.Event | None) -> None:
        num_good, thread = 0, max(order.tier for order in orders)
        try:
            if after is not None:
                # Ahead of what is timed: a step in flight is no cost of a tier's blocks.
                after.synchronize()
            for some in _cut(orders, self._num_at_once):
                num_filled = self._fill(ticket, some, self._up[thread], after)
                num_good += num_filled
                if num_filled < len(some):
                    break
        except Exception:
            # Last resort of the thread: otherwise the request would wait forever.
            _logger.exception("copying blocks of the KV cache from a tier failed")
        self._fetched.append((ticket, num_good))
        self._on_done()

    def _fill(self, ticket: int, orders: Sequence[BlockOrder], up: CacheBytes, after: torch.cuda.Event | None) -> int:
        """Fill blocks from one tier; return how many leading ones were filled, none of a fetch that was given up."""
        started_s = time.monotonic()
        contents = [*self._readable(ticket, orders)]
        if not contents:
            return 0
        with self._writing:
            is_wanted = ticket not in self._given_up
            if is_wanted:
                up.write([order.block for order in orders[: len(contents)]], contents, after)
        # Of what was given up, too: from a slow tier, nothing else might ever be read.
        self._times[orders[0].tier].learn((time.monotonic() - started_s) / len(contents))
        return len(contents) if is_wanted else 0

    def _readable(self, ticket: int, orders: Sequence[BlockOrder]) -> Iterator[torch.Tensor]:
        for order in orders:
            is_over = self._is_closing or ticket in self._given_up
            content = None if is_over else self._tiers[order.tier].read(order.slot, order.name)
            if content is None:
                return
            yield content


def _cut(orders: Sequence[BlockOrder], size: int) -> Iterator[Sequence[BlockOrder]]:
    """Yield runs of up to `size` orders, each of one tier."""
    start = 0
    for end, order in enumerate(orders, 1):
        if end - start == size or end == len(orders) or orders[end].tier != order.tier:
            yield orders[start:end]
            start = end


class CacheBytes:
    """The content of cache blocks as bytes on the host; each copying thread has its own instance.

    On a GPU, copies run on a separate stream and wait for what was launched before they were ordered (`launched`): a
    step under way may still write what is read, or read what is written. Later ones need not be waited for, which would
    take as long as they do: they do not write what is read unless its copy is abandoned, nor use what is filled.
    """

    def __init__(self, cache: KvCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, blocks: Sequence[int], after: torch.cuda.Event | None) -> torch.Tensor:
        """Return the content of blocks, bytes [len(blocks), block_bytes], once the copy is done."""
        if self._stream is None or after is None:
            return self._cache.read(blocks)
        with self._beside(self._stream, after):
            content = self._cache.read(blocks)
            copied = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            copied.copy_(content, non_blocking=True)
        return copied

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor], after: torch.cuda.Event | None) -> None:
        """Fill blocks with bytes [block_bytes] each; return once the copy is done."""
        if self._stream is None or after is None:
            self._cache.write(blocks, torch.stack([*contents]))
            return
        with self._beside(self._stream, after):
            arrived = [content.to(self._device, non_blocking=True) for content in contents]
            self._cache.write(blocks, torch.stack(arrived))

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream, after: torch.cuda.Event) -> Iterator[None]:
        """Enqueue on a stream, and wait for it in the end, even on an error: others may use both sides then."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(after)
            try:
                yield
            finally:
                stream.synchronize()


def launched(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes after all that the default stream has been given; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(device))
    return event


class BlockTime:
    """How long a block of a tier takes to be fetched, by recent fetches; any thread may learn or ask."""

    def __init__(self) -> None:
        self._block_s = self._measured_at_s = 0.0

    @property
    def expected_s(self) -> float:
        """Seconds per block; 0 before the first measurement."""
        return self._block_s * self._memory()

    def learn(self, block_s: float) -> None:
        """Note a measurement."""
        if self._block_s:
            # The old estimate's weight decays, but its undecayed value caps the new time: a decayed cap comes too low.
            old_share = (1 - NEW_SHARE) * self._memory()
            block_s = old_share * self._block_s + (1 - old_share) * min(block_s, MAX_SURPRISE * self._block_s)
        self._block_s, self._measured_at_s = block_s, time.monotonic()

    def _memory(self) -> float:
        """Return the share of the estimate that has not decayed."""
        return math.exp2((self._measured_at_s - time.monotonic()) / HALVING_S)
