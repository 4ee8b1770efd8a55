"""The end of a gateway that is told beforehand: it takes nothing more, and finishes what it has or says it cannot."""

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
"""So long the error that ends an answer may take to reach its client."""
_POLL_S = 0.05


class Draining:
    """The answers that one gateway has under way, and whether it takes more. Lives on one event loop."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._has_begun = False

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Count an answer that a block makes.

        Raises:
            OverloadError: no more are taken.
        """
        if self._has_begun:
            raise OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S)
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1

    def told(self, health: HealthReport) -> HealthReport:
        """Return the health of the application as this gateway has to tell it."""
        if not self._has_begun:
            return health
        return replace(health, state_by_part=health.state_by_part | {"gateway": STOPPING})

    async def run(self, limit_s: float, fail_all: Callable[[Exception], None] | None) -> None:
        """Take no more answers, and return once those under way have ended.

        Args:
            fail_all: ends those that are left after `limit_s` with an error; None where nobody can.
        """
        self._has_begun = True
        loop = asyncio.get_running_loop()
        limit_at_s = loop.time() + limit_s
        while self._num_under_way and loop.time() < limit_at_s + LAST_WORDS_S:
            if fail_all is not None and loop.time() >= limit_at_s:
                fail_all(OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S))
            await asyncio.sleep(_POLL_S)
