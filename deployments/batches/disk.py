"""The one thread that touches the disk, and what is done where the disk cannot take something now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from deployments.database import TROUBLES
from deployments.disk_trouble import RETRY_S, unavailable_on

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


class Disk:
    """Runs work one after the other, in a thread; `sleep` is how everybody waits who has to do with batches."""

    def __init__(self, *, sleep: Sleep = asyncio.sleep) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.sleep = sleep

    async def once(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something that a client waits for.

        Raises:
            UnavailableError: the disk cannot take it now.
            Exception: what the work raised otherwise.
        """
        with unavailable_on(*TROUBLES):
            return await self._run(partial(work, *args, **kwargs))

    async def surely(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something that has to be done: where the disk cannot take it, wait, and try again for ever."""
        while True:
            try:
                return await self._run(partial(work, *args, **kwargs))
            except TROUBLES as error:
                _logger.warning("a batch waits for the disk: %s", error)
                await self.sleep(RETRY_S)

    def later(self, work: Callable[[], None]) -> None:
        """Do something after all that is under way; nobody waits for it."""
        self._thread.submit(work)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
