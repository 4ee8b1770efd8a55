"""Graceful shutdown of a gateway: it takes no new answers, and finishes running ones or ends them with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from deployments.generation import HealthReport
from engine.errors import OverloadError

STOPPING = "The server is stopping."
RETRY_AFTER_S = 5.0
LAST_WORDS_S = 3.0
"""Time allowed for the error that ends an answer to reach its client."""
_POLL_S = 0.05


class Draining:
    """Counts one gateway's running answers and decides whether it takes more. Bound to one event loop."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._has_begun = False

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Count the answer that a `with` block produces.

        Raises:
            OverloadError: the gateway is draining.
        """
        if self._has_begun:
            raise OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S)
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1

    def told(self, health: HealthReport) -> HealthReport:
        """Return the application's health with this gateway marked as stopping once it drains."""
        if not self._has_begun:
            return health
        return replace(health, state_by_part=health.state_by_part | {"gateway": STOPPING})

    async def run(self, limit_s: float, fail_all: Callable[[Exception], None] | None) -> None:
        """Refuse new answers; return when the running ones have ended, at the latest `LAST_WORDS_S` after `limit_s`.

        Args:
            fail_all: ends the answers left after `limit_s` with an error; None if that is impossible.
        """
        self._has_begun = True
        loop = asyncio.get_running_loop()
        limit_at_s = loop.time() + limit_s
        while self._num_under_way and loop.time() < limit_at_s + LAST_WORDS_S:
            if fail_all is not None and loop.time() >= limit_at_s:
                fail_all(OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S))
            await asyncio.sleep(_POLL_S)
