"""Waiting: for a part of the server that has died and is being replaced, and for several calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from deployments.errors import UnavailableError

T = TypeVar("T")

POLL_S = 0.25


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Await a call, again and again while nobody is there to answer it.

    Raises:
        UnavailableError: nobody has come in so many seconds.
        Exception: what the call raised otherwise.
    """
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + patience_s
    while True:
        try:
            return await call()
        except UnavailableError:
            if loop.time() + POLL_S > give_up_at_s:
                raise
            await asyncio.sleep(POLL_S)


async def side_by_side(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls at the same time and return what they return, in order.

    The first that fails, or the end of the caller, ends the others; nothing of them is left when this returns.

    Raises:
        Exception: what the first one raised.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
