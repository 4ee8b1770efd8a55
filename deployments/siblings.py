"""Parts of one client request, which wait for each other: an idle server would refuse more work than may queue.

A retry of the whole request would be refused again and again. Bound to one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import OverloadError

FULL = ("queue_full", "replicas_full")
"""Reasons of an `OverloadError` that tell of too many requests, whatever their size."""
BATCH_TIME = "batch_time"
"""Reason of the classifier, which judges in batches, for a text whose turn would come too late."""
_NO_ROOM = ("queue_time", BATCH_TIME, *FULL)


class Siblings:
    """The parts of one request, for instance its prompts or inputs.

    When one finds no room, the others may have filled the queue. It is asked for again once half of those have left the
    queue, not before: others than this request should find room in it, too.

    Attributes:
        have_begun: whether any has been asked for.
        draw: number in [0, 1) that chooses one version of a split adapter for all of them.
    """

    def __init__(self) -> None:
        self.have_begun = False
        self.draw = random.random()
        self._num_asked = 0
        self._queued = set[object]()
        self._num_left = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def asked(self, part: object) -> Iterator[None]:
        """Ask for a part in the block; it is in the queue until `leave_queue`, or the end of the block."""
        self.have_begun = True
        self._num_asked += 1
        self._queued.add(part)
        has_found_room = True
        try:
            yield
        except OverloadError:
            has_found_room = False
            raise
        finally:
            self._num_asked -= 1
            if not has_found_room:
                self._queued.discard(part)
            elif part in self._queued:
                self.leave_queue(part)
            elif not self._queued:
                self._ask_again(1)

    def leave_queue(self, part: object) -> None:
        """Note that a part no longer waits in the queue; once half of them do not, ask again for as many."""
        self._queued.discard(part)
        self._num_left += 1
        if self._num_left >= len(self._queued):
            self._ask_again(self._num_left)
            self._num_left = 0

    def may_wait(self, error: OverloadError) -> bool:
        """Tell whether a part that was refused may wait: for want of room, while another part has it."""
        return error.reason in _NO_ROOM and self._num_asked > 0

    async def until_room(self) -> None:
        """Wait until there may be room, and ask again at once."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        finally:
            if not place.cancelled():
                self._num_asked -= 1

    def _ask_again(self, count: int) -> None:
        """Wake the first of those that wait."""
        for _ in range(min(count, len(self._waiting))):
            place = self._waiting.popleft()
            if not place.cancelled():
                place.set_result(None)
                # Until it is: what is refused meanwhile may wait for it.
                self._num_asked += 1
