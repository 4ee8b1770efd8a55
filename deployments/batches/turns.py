"""Turns of the requests of all batches, of which so many are under way at once. Tenants take them in rotation.

By arrival, a tenant would have a share for each of its batches. Bound to one event loop; standard library only.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """So many turns.

    Args:
        count: how many requests are under way at once.
    """

    def __init__(self, count: int) -> None:
        self._num_free = count
        # The tenant whose turn is next comes first. None has an empty queue.
        self._waiting_by_tenant: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, tenant: str) -> None:
        """Wait for a turn: in rotation among the tenants that wait, by arrival among the requests of one."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting_by_tenant.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                self.give_back()
            raise

    def give_back(self) -> None:
        """Give a turn to whoever is next."""
        while self._waiting_by_tenant:
            tenant, waiting = next(iter(self._waiting_by_tenant.items()))
            del self._waiting_by_tenant[tenant]
            turn = waiting.popleft()
            if waiting:
                self._waiting_by_tenant[tenant] = waiting
            # Not one that is being cancelled in this moment.
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting_by_tenant.get(tenant, deque())
        if turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting_by_tenant[tenant]
