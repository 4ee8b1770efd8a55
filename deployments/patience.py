"""Waiting for a part of the server that has died and is being replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

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
