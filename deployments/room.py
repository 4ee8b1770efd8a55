"""A bound on concurrent calls to a part of the server; callers beyond it wait here, and flows take turns.

Under overload a part's time limit must measure the part. If all requests of a gateway called it at once, each would
wait for all others, all would exceed the limit, and the work on them would be lost. Bound to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager

NUM_PLACES = 32
"""By default, a full batch of the classifier: what waits beyond it would only wait there instead, in one queue. The
tokenizer takes as many, and batches as many as are configured."""
NUM_GUESTS = 8
"""More places, for flows that hold none: they need not wait for one flow's long calls, which may hold all others."""


class Room:
    """Places for at most `num_places` callers, and for `num_guests` more of flows that hold no place."""

    def __init__(self, num_places: int = NUM_PLACES, num_guests: int = NUM_GUESTS) -> None:
        self._num_places, self._num_guests = num_places, num_guests
        self._num_inside = 0
        self._inside_by_flow = Counter[Hashable]()
        self._waiting_by_flow: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, flow: Hashable) -> AsyncGenerator[None, None]:
        """Hold a place; waits for one if all are taken. Callers of one flow get theirs in order."""
        if self._has_place(flow):
            self._enter(flow)
        else:
            await self._turn(flow)
        try:
            yield
        finally:
            self._leave(flow)

    @asynccontextmanager
    async def timed_place(
        self, flow: Hashable, limit_s: float, max_wait_s: float | None = None
    ) -> AsyncGenerator[None, None]:
        """Hold a place for at most `limit_s`; the time before does not count, but has its own bound `max_wait_s`.

        Raises:
            TimeoutError: either has passed.
        """
        async with asyncio.timeout(max_wait_s) as timeout, self.place(flow):
            timeout.reschedule(asyncio.get_running_loop().time() + limit_s)
            yield

    def _has_place(self, flow: Hashable) -> bool:
        num_guests = 0 if self._inside_by_flow[flow] else self._num_guests
        return self._num_inside < self._num_places + num_guests

    def _enter(self, flow: Hashable) -> None:
        self._num_inside += 1
        self._inside_by_flow[flow] += 1

    async def _turn(self, flow: Hashable) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting_by_flow.setdefault(flow, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It got its place just before it was cancelled.
                self._leave(flow)
            raise

    def _leave(self, flow: Hashable) -> None:
        """Free a place, and let in those who may have one, by how long their flows have waited for a turn."""
        self._num_inside -= 1
        self._inside_by_flow[flow] -= 1
        if not self._inside_by_flow[flow]:
            del self._inside_by_flow[flow]
        while self._let_in():
            pass

    def _let_in(self) -> bool:
        """Take the next turn; False if nobody waits who may have a place."""
        for flow in self._waiting_by_flow:
            if self._has_place(flow):
                turns = self._waiting_by_flow[flow]
                turn = turns.popleft()
                if not turn.cancelled():
                    self._enter(flow)
                    turn.set_result(None)
                    self._waiting_by_flow.move_to_end(flow)
                if not turns:
                    del self._waiting_by_flow[flow]
                return True
        return False
