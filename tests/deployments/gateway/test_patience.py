from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.channel.token_channel import ChannelListener
from deployments.config import ChannelConfig
from deployments.errors import UnavailableError
from deployments.gateway import patience
from deployments.gateway.replica_calls import ChannelSource
from deployments.generation_calls import GenerationCall, TokenAddress
from deployments.routing.board import Board
from engine.request import RequestId, SamplingParams
from tests.deployments.in_process import SECRET, Method, Response


async def test_a_call_waits_for_a_replica_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the only replica's node gone, clients waited until their own timeouts: Serve's router has none."""
    monkeypatch.setattr(patience, "CHECK_S", 0.0)
    checks: list[bool] = []

    class Watched(Board):
        def is_deserted(self) -> bool:
            checks.append(super().is_deserted())
            return checks[-1]

    async def until_checked() -> None:
        count = len(checks) + 2 * patience.NUM_CHECKS
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
    assert checks[-patience.NUM_CHECKS - 1 :] == [False] + [True] * patience.NUM_CHECKS
