"""A replica's answers to what gateways ask of it."""

from __future__ import annotations

import asyncio

from deployments.channel.token_channel import ChannelListener
from deployments.config import ChannelConfig, ModelConfig
from deployments.routing.report import FORMAT, LoadReport
from tests.deployments.conftest import Serving
from tests.deployments.in_process import SECRET


async def test_a_gateway_of_another_release_is_sent_no_reports(tiny_model: ModelConfig) -> None:
    """It closed the connection on the first that it could not read, and all streams over it were lost."""
    config, heard = ChannelConfig(secret=SECRET, host="127.0.0.1"), asyncio.Queue[LoadReport]()
    server = Serving(tiny_model, config).replicas.server
    listener = ChannelListener(config, "gateway", on_report=lambda report, _: heard.put_nowait(report))
    address = await listener.start()
    await server.watch(address)
    await server.watch(address, f"{FORMAT} another:int")
    assert not server._reporter._watchers
    await server.watch(address, FORMAT)
    async with asyncio.timeout(30):
        assert (await heard.get()).is_whole
    await server.stop()
    await listener.close()
