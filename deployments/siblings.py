"""Parts of one client request, which wait for each other: an idle server would refuse more work than may queue.

A retry of the whole request would be refused again and again. Bound to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import OverloadError

FULL = ("queue_full", "replicas_full")
"""Reasons of an `OverloadError` that tell of too many requests, whatever their size."""
_NO_ROOM = ("queue_time", *FULL)
WOKEN = 2
"""How many of those without room are asked for again when one has had its turn: there may be room for more than one."""


class Siblings:
    """The parts of one request, for instance its prompts or inputs.

    Attributes:
        have_begun: whether any has been asked for.
    """

    def __init__(self) -> None:
        self._num_asked = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.have_begun = False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Ask for a part in the block; after it there may be room for others, unless this one found none."""
        self.have_begun = True
        self._num_asked += 1
        has_found_room = True
        try:
            yield
        except OverloadError:
            has_found_room = False
            raise
        finally:
            self._num_asked -= 1
            if has_found_room:
                self.make_room()

    def make_room(self) -> None:
        """Have the first of those that wait asked for again."""
        for _ in range(min(WOKEN, len(self._waiting))):
            place = self._waiting.popleft()
            if not place.cancelled():
                place.set_result(None)
                # Until it is: what is refused meanwhile may wait for it.
                self._num_asked += 1

    def may_wait(self, error: OverloadError) -> bool:
        """Tell whether a part that was refused may wait: for want of room, while another part has it."""
        return error.reason in _NO_ROOM and self._num_asked > 0

    async def room(self) -> None:
        """Wait until there may be room, and ask again at once."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        finally:
            if not place.cancelled():
                self._num_asked -= 1
