"""Wait for a part of the server that has died and is being replaced, for several calls at once, or for a shared one.

Also starts work that outlives the request that starts it, or the wait for it, and repeats that of background tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, Generic, TypeVar

from deployments.errors import UnavailableError
from engine.errors import OverloadError

_logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.25
_detached: set[asyncio.Task[Any]] = set()


async def patiently(
    call: Callable[[], Awaitable[T]], patience_s: float, passing: type[OverloadError] = UnavailableError
) -> T:
    """Await a call, retrying while it raises `passing` errors, for up to `patience_s` seconds.

    Raises:
        OverloadError: the part was still unavailable after that time.
        Exception: any other error of the call.
    """
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + patience_s
    while True:
        try:
            return await call()
        except passing as error:
            # Who is unavailable may be back at any time, who is overloaded knows when there is room.
            pause_s = POLL_S if isinstance(error, UnavailableError) else max(POLL_S, error.retry_after_s)
            if loop.time() + pause_s > give_up_at_s:
                raise
            await asyncio.sleep(pause_s)


async def side_by_side(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order.

    The first failure, or cancellation of the caller, cancels the others; none is running when this returns.

    Raises:
        Exception: the error of the first call that failed.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def detached(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work that runs to its end even if the request that starts it is cancelled; await it by `asyncio.shield`."""
    # In an empty context: otherwise Serve would cancel the calls inside together with the request.
    task = asyncio.create_task(work, context=Context())
    # The event loop holds only weak references to tasks.
    _detached.add(task)
    task.add_done_callback(_detached.discard)
    return task


async def in_thread(call: Callable[[], T], threads: Executor | None = None) -> T:
    """Run a call in one of the threads, by default the loop's; it cannot be stopped.

    It has ended when this returns, even if the caller was cancelled meanwhile.
    """
    done = asyncio.get_running_loop().run_in_executor(threads, call)
    try:
        return await asyncio.shield(done)
    finally:
        await asyncio.wait({done})


async def for_ever(work: Callable[[], Awaitable[object]], pause: Callable[[], Awaitable[object]], failure: str) -> None:
    """Repeat work, with a pause after each time, until cancelled. Errors are logged as `failure` and end nothing."""
    task = asyncio.current_task()
    assert task is not None
    while True:
        try:
            await work()
        except Exception:
            _logger.exception(failure)
        # An error may have taken the place of a cancellation, which a pause would not notice.
        if task.cancelling():
            return
        await pause()


class SharedCall(Generic[T]):
    """A call that everyone who asks while it runs shares. It runs to its end even if all of them leave."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the result of the running call, or of a new one; raises its error."""
        if self._running is None or self._running.done():
            self._running = detached(self._call())
        return await asyncio.shield(self._running)
