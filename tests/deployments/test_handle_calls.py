from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray import serve
from ray.serve.exceptions import RequestCancelledError

from deployments.errors import ReplicaLostError, UnavailableError
from deployments.handle_calls import CALL_ERRORS, ask_actor, connected_handle, reached, serve_error, until_answered
from tests.deployments.in_process import Method, Response


@pytest.fixture
async def pending() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


def test_a_handle_that_is_ready_for_calls_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve connects a handle by its first call, or by changing its options."""
    steps: list[Any] = []
    handle = SimpleNamespace(options=lambda: steps.append("connected"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *name: steps.append(name) or handle)
    connected_handle("Part")
    assert steps == [("Part", "app"), "connected"]


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


def test_an_error_of_grpc_is_that_of_a_lost_replica() -> None:
    """The stream ended with status 500, and did not go on elsewhere."""
    error = AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata(), "RST_STREAM")
    assert isinstance(error, CALL_ERRORS)
    assert isinstance(serve_error(error), ReplicaLostError)


async def test_a_part_whose_connection_is_lost_cannot_be_reached() -> None:
    """It counted as one that has failed, for which a running answer does not wait."""

    async def lost() -> None:
        raise AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), "The server is stopped.")

    with pytest.raises(UnavailableError, match=r"The classifier cannot be reached\."):
        await reached("classifier", lost)
