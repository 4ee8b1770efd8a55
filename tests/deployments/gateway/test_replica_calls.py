from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from deployments.channel.token_channel import ChannelListener
from deployments.config import ChannelConfig, ModelConfig
from deployments.errors import ReplicaLostError, UnavailableError
from deployments.gateway import replica_calls
from deployments.gateway.replica_calls import ChannelSource
from deployments.generation_calls import GenerationCall, TokenAddress
from deployments.routing.board import Board
from engine.request import Emission, FinishReason, RequestId, SamplingParams
from tests.deployments.conftest import Serving
from tests.deployments.in_process import SECRET, Method, Response, ask, events_of


async def test_a_call_waits_for_a_replica_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the only replica's node gone, clients waited until their own timeouts: Serve's router has none."""
    monkeypatch.setattr(replica_calls, "CHECK_S", 0.0)
    checks: list[bool] = []

    class Watched(Board):
        def is_deserted(self) -> bool:
            checks.append(super().is_deserted())
            return checks[-1]

    async def until_checked() -> None:
        count = len(checks) + 2 * replica_calls.NUM_CHECKS
        while len(checks) < count:
            await asyncio.sleep(0)

    board, channel = Watched(), ChannelConfig(transport="tcp", secret=SECRET)
    listener, waits = ChannelListener(channel, "gateway"), Method(lambda _: Response(asyncio.Event().wait()))
    handle: Any = SimpleNamespace(generate=waits)
    source = ChannelSource(handle, listener, TokenAddress(gateway_id="gateway", host="", port=1), board)
    call = GenerationCall(request_id=RequestId("r"), prompt_ids=b"", params=SamplingParams(max_tokens=1))
    asked = asyncio.ensure_future(anext(source.tokens(call)))
    async with asyncio.timeout(20):
        await until_checked()  # Serve's list has not come yet.
        board.set_replicas(["a"])
        await until_checked()
        assert not asked.done()
        board.set_replicas([])
        with pytest.raises(UnavailableError):
            await asked
    assert checks[-replica_calls.NUM_CHECKS - 1 :] == [False] + [True] * replica_calls.NUM_CHECKS


async def test_a_cancelation_that_a_frame_tells_of_first_is_not_the_readers(tiny_model: ModelConfig) -> None:
    serving = Serving(tiny_model, ChannelConfig(transport="tcp", secret=SECRET, host="127.0.0.1"))
    await events_of(await serving.gateway(), ask())
    await serving.replicas.server.stop()
    call = serving.replicas.calls[-1]
    listener = ChannelListener(ChannelConfig(transport="tcp", secret=SECRET), "gateway")
    canceled = asyncio.get_running_loop().create_future()
    handle = SimpleNamespace(generate=Method(lambda _: Response(canceled)))
    board = SimpleNamespace(lose_request=lambda *_: None, end=lambda _: None)
    source = ChannelSource(handle, listener, TokenAddress(gateway_id="gateway", host="", port=1), board)
    reading = asyncio.ensure_future(anext(source.tokens(call)))
    await asyncio.sleep(0)
    told = Emission(request_id=call.request_id, finish_reason=FinishReason.CANCELLED)
    listener._subscriptions[call.request_id].put(told)
    await asyncio.sleep(0)
    canceled.cancel()
    with pytest.raises(ReplicaLostError):
        await reading


async def test_a_call_that_cannot_even_be_made_leaves_no_subscription(tiny_model: ModelConfig) -> None:
    def refuse(call: GenerationCall) -> Response:
        raise RayServeException("deleted")

    serving = Serving(tiny_model, ChannelConfig(transport="tcp", secret=SECRET, host="127.0.0.1"))
    await events_of(await serving.gateway(), ask())
    await serving.replicas.server.stop()
    listener = ChannelListener(ChannelConfig(transport="tcp", secret=SECRET), "gateway")
    handle: Any = SimpleNamespace(generate=Method(refuse))
    source = ChannelSource(handle, listener, TokenAddress(gateway_id="gateway", host="", port=1), Board())
    with pytest.raises(RayServeException):
        await anext(source.tokens(serving.replicas.calls[-1]))
    assert not listener._subscriptions
