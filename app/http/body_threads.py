"""Threads that read large bodies: to do so takes seconds, and comes before any limit of a tenant. Flows take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.room import Room

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
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(done)
            finally:
                # A thread cannot be stopped: its place is taken, though its client may have left.
                await asyncio.wait({done})
