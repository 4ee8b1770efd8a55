"""The thread in which an actor accesses its disk and database, and the retry policies for their trouble."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from deployments.database import TROUBLES
from deployments.errors import RETRY_S, unavailable_on

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


class Disk:
    """Runs jobs one at a time in a thread, which has the given name.

    All actors that store anything use `once`. The rest is for batches, whose code always waits with `sleep`.
    """

    def __init__(self, name: str, *, sleep: Sleep = asyncio.sleep) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.sleep = sleep

    async def once(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that a client waits for.

        Raises:
            UnavailableError: the disk or database is not available now.
            Exception: any other exception of the work.
        """
        with unavailable_on(*TROUBLES):
            return await self._run(partial(work, *args, **kwargs))

    async def surely(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that must succeed: on disk or database trouble, wait and retry forever."""
        return await self._retried(lambda: self._run(partial(work, *args, **kwargs)))

    async def aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work as `surely` does, but in another thread: reading a large file must not hold up all others."""
        return await self._retried(lambda: asyncio.to_thread(work, *args, **kwargs))

    def later(self, work: Callable[[], None]) -> None:
        """Queue work behind all pending jobs without waiting for it."""
        self._thread.submit(work)

    async def _retried(self, start: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await start()
            except TROUBLES as error:
                _logger.warning("a batch waits for the disk: %s", error)
                await self.sleep(RETRY_S)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
