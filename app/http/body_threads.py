"""Threads that read large bodies: to do so takes seconds, and comes before any limit of a tenant. Flows take turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.room import Room
from deployments.waits import in_thread

T = TypeVar("T")

NUM_PLACES = 2
"""Few, as the interpreter runs one thread at a time, and the event loop waits for its turn among them."""
NUM_GUESTS = 4
"""More, for flows that hold none."""


class BodyThreads:
    """Threads of which no flow holds more than `NUM_PLACES`. Nothing else waits for them. Bound to one event loop."""

    def __init__(self) -> None:
        self._room = Room(NUM_PLACES, NUM_GUESTS)
        self._threads = ThreadPoolExecutor(NUM_PLACES + NUM_GUESTS, thread_name_prefix="body")

    async def run(self, flow: Hashable, work: Callable[[], T]) -> T:
        """Return what work returns on one of the threads."""
        async with self._room.place(flow):
            # Its place is taken until it has ended, though its client may have left.
            return await in_thread(work, self._threads)
