"""Run a blocking model behind an event loop: items that arrive together share a batched call in a worker thread."""

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
"""A call that takes longer counts as hung."""


class BatchedModel(Generic[Item, Result]):
    """Batches calls to one model for one event loop; a base class for specific models.

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
        # One thread: concurrent forward passes would compete for the same cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        # Not used as a decorator, which would share one queue among all instances and event loops.
        self._together: Callable[[Item], Awaitable[Result]] = serve.batch(
            max_batch_size=max_batch, batch_wait_timeout_s=batch_wait_s
        )(self._batch)

    async def results(self, items: Sequence[Item]) -> list[Result]:
        """Return a result for each item, in order."""
        return list(await asyncio.gather(*(self._together(item) for item in items)))

    async def trouble(self) -> str | None:
        """Return why no results come, or None if they do. Gateways call it."""
        return self._trouble()

    def check_health(self) -> None:
        """Check for Serve that the model makes progress.

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
