"""What a GPU may do in any order: streams and events as vector clocks, and the accesses that nothing orders.

    stream 0     write x ──── record e ────────────────────────── free x
    stream 1                     └─ wait e ── read x (ordered) ── read x: may come after the free, or not

Everything is computed at once, in the order in which the host asks for it; so the numbers are right in any case. What
is checked is that a GPU, where streams run side by side and the host goes ahead of them, would compute the same.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRAIN = 4
"""Bytes that are told apart."""

Grains = slice | NDArray[np.int64]
Clock = Counter[int]
"""Stream -> how many of its operations are known to be done."""


@dataclass(slots=True)
class Stream:
    """A queue of the device.

    Attributes:
        seen: what is done before the stream's next operation starts.
    """

    number: int
    seen: Clock = field(default_factory=Clock)


@dataclass(slots=True, eq=False)
class Block:
    """Memory that was allocated at once.

    Attributes:
        start, end: its addresses.
        stream: of which stream's memory it is; None for page-locked memory of the host.
        written, read: stream -> when it last accessed each grain.
        kept_for: streams whose work is waited for before the memory is used again.
        is_recorded: whether it belongs to a recording, whose end its replays do not wait for.
        marks: what `tests.simulated_gpu.programs` notes of it.
        owner: keeps the memory.
    """

    start: int
    end: int
    stream: Stream | None
    owner: Any
    written: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    read: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)
    is_recorded: bool = False
    marks: Any = None

    @property
    def num_grains(self) -> int:
        """How many grains it has."""
        return -(-(self.end - self.start) // GRAIN)

    def mark(self, times: dict[int, NDArray[np.int64]], stream: int, grains: Grains, time: int) -> None:
        """Note an access."""
        if stream not in times:
            times[stream] = np.zeros(self.num_grains, dtype=np.int64)
        times[stream][grains] = time

    def is_behind(self, seen: Clock, grains: Grains, *, is_write: bool) -> bool:
        """Return whether all accesses that an access must follow are in a clock."""
        before = [self.written, self.read] if is_write else [self.written]
        return all(
            not np.any(times[grains] > seen[stream]) for by_stream in before for stream, times in by_stream.items()
        )


class Order:
    """Who waits for whom, and every access that would have had to wait.

    Attributes:
        faults: what went wrong, and where.
        waits: where the host waited for the device without having asked for it by an event, and why.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: list[str] = []
        self.host: Clock = Clock()
        self.lock = threading.RLock()
        self._streams: list[Stream] = []
        self._local = threading.local()
        self.default = self.new_stream()

    def new_stream(self) -> Stream:
        """Return a stream that waits for nobody."""
        with self.lock:
            self._streams.append(Stream(len(self._streams)))
            return self._streams[-1]

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._local, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._local.stream = stream

    def start(self) -> None:
        """Enqueue an operation on this thread's stream: what the host has seen done is done before it."""
        with self.lock:
            stream = self.current
            stream.seen |= self.host
            stream.seen[stream.number] += 1

    def access(self, block: Block, grains: Grains, *, is_write: bool) -> None:
        """Check and note an access of the operation that this thread has started last."""
        if not is_write and getattr(self._local, "is_optimistic", False):
            return
        with self.lock:
            stream = self.current
            if not block.is_behind(stream.seen, grains, is_write=is_write):
                self.fault(f"stream {stream.number} {'writes' if is_write else 'reads'} what another still uses")
            block.mark(block.written if is_write else block.read, stream.number, grains, stream.seen[stream.number])

    @contextmanager
    def optimistic(self) -> Iterator[None]:
        """Let this thread read what others may write meanwhile: it finds out, and throws away what it has read."""
        self._local.is_optimistic = True
        try:
            yield
        finally:
            self._local.is_optimistic = False

    def access_by_host(self, block: Block, grains: Grains, *, is_write: bool) -> None:
        """Check that the device is done with what the host accesses."""
        with self.lock:
            if not block.is_behind(self.host, grains, is_write=is_write):
                self.fault(f"the host {'writes' if is_write else 'reads'} what the device still uses")

    def free(self, block: Block) -> None:
        """Check that whoever gets the memory next, on the same stream, comes after all that used it."""
        with self.lock:
            if block.stream is None or block.is_recorded:
                return
            seen = block.stream.seen | self.host
            for times in (block.written, block.read):
                for stream, accesses in times.items():
                    if stream not in block.kept_for and np.any(accesses > seen[stream]):
                        self.fault(f"memory is freed on stream {block.stream.number} while {stream} still uses it")

    def join(self, stream: Stream, other: Stream) -> None:
        """Have what comes on a stream wait for what is on another."""
        with self.lock:
            stream.seen |= other.seen

    def wait_for(self, *streams: Stream) -> None:
        """Have the host wait for streams, or for all of them."""
        with self.lock:
            for stream in streams or self._streams:
                self.host |= stream.seen

    def fault(self, what: str) -> None:
        """Note what went wrong."""
        self.faults.append(f"{what}\n{where()}")


def where() -> str:
    """Return the lines of the product that led here, the innermost last."""
    frames = [frame for frame in traceback.extract_stack() if _is_product(frame.filename)]
    return "\n".join(f"    {frame.filename}:{frame.lineno} {frame.line}" for frame in frames)


def _is_product(path: str) -> bool:
    return any(f"/{house}/" in path for house in ("engine", "kernels", "adapters")) and "site-packages" not in path
