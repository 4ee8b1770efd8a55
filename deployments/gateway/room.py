"""A bound on concurrent calls to a part of the server; callers beyond it wait here, and flows take turns.

Under overload a part's time limit must measure the part. If all requests of a gateway called it at once, each would
wait for all others, all would exceed the limit, and the work on them would be lost. Bound to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager

NUM_PLACES = 32
"""A full batch of the classifier by default. What waits beyond it would only wait there instead, in one queue."""


class Room:
    """Places for at most `num_places` callers."""

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_free = num_places
        self._waiting_by_flow: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, flow: Hashable) -> AsyncGenerator[None, None]:
        """Hold a place; waits for one if all are taken. Callers of one flow get theirs in order."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(flow)
        try:
            yield
        finally:
            self._leave()

    async def _turn(self, flow: Hashable) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting_by_flow.setdefault(flow, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It got its place just before it was cancelled.
                self._leave()
            raise

    def _leave(self) -> None:
        """Pass the place on to the flow that has waited longest for a turn, or free it."""
        while self._waiting_by_flow:
            flow, turns = self._waiting_by_flow.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting_by_flow[flow] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_free += 1
