"""A model that blocks, behind an event loop: items that arrive together share a call, which runs in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ray import serve

from engine.errors import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_CALL_S = 60.0
"""A call that takes longer has hung."""


class BatchedModel(Generic[Item, Result]):
    """Serves one event loop; what asks the model for what extends it.

    Args:
        call: returns a result for each item, in order; blocks.
        what: name of the model, for messages.
    """

    def __init__(
        self,
        call: Callable[[list[Item]], Sequence[Result]],
        what: str,
        *,
        max_batch: int,
        batch_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._what = what
        self._clock = clock
        self._began_s: float | None = None
        # One thread: a second forward pass at the same time would fight for the same cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        # Applied here and not as a decorator, which would keep one queue for all instances and event loops.
        self._together: Callable[[Item], Awaitable[Result]] = serve.batch(
            max_batch_size=max_batch, batch_wait_timeout_s=batch_wait_s
        )(self._batch)

    async def results(self, items: Sequence[Item]) -> list[Result]:
        """Return a result for each item, in order."""
        return list(await asyncio.gather(*(self._together(item) for item in items)))

    async def trouble(self) -> str | None:
        """Return why results do not come, None where they do; asked by gateways."""
        return self._trouble()

    def check_health(self) -> None:
        """Serve's health check.

        Raises:
            EngineError: the model hangs.
        """
        trouble = self._trouble()
        if trouble is not None:
            raise EngineError(trouble)

    def _trouble(self) -> str | None:
        began_s = self._began_s
        if began_s is None or self._clock() - began_s <= MAX_CALL_S:
            return None
        return f"the {self._what} has been at one batch for {self._clock() - began_s:.0f} seconds"

    async def _batch(self, items: list[Item]) -> list[Result]:
        return list(await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, items))

    def _timed(self, items: list[Item]) -> Sequence[Result]:
        self._began_s = self._clock()
        try:
            return self._call(items)
        finally:
            self._began_s = None
