from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import RequestCancelledError

from deployments.errors import UnavailableError
from deployments.handle_calls import ask_actor, until_answered
from tests.deployments.in_process import Method, Response


@pytest.fixture
async def pending() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


async def test_a_call_canceled_on_its_replica_does_not_cancel_its_caller(pending: asyncio.Future[str]) -> None:
    response = Response(pending)
    pending.cancel()
    with pytest.raises(RequestCancelledError):
        await until_answered(response)


async def test_an_actor_that_cancels_a_call_is_unavailable(pending: asyncio.Future[str]) -> None:
    actor = SimpleNamespace(act=Method(lambda: Response(pending)))
    pending.cancel()
    with pytest.raises(UnavailableError, match=r"It is away\."):
        await ask_actor(actor, "act", absence="It is away.", retry_after_s=1, timeout_s=60)


async def test_a_canceled_caller_cancels_its_call(pending: asyncio.Future[str]) -> None:
    waiting = asyncio.ensure_future(until_answered(Response(pending)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    assert pending.cancelled()


async def test_a_call_that_takes_too_long_is_canceled(pending: asyncio.Future[str]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await until_answered(Response(pending))
    assert pending.cancelled()
