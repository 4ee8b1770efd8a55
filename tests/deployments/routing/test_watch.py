"""Two real replicas, a real channel, and the board between: only Serve's handle is a stand-in."""

from __future__ import annotations

import asyncio
from functools import partial

from deployments.channel.token_channel import ChannelDialer, ChannelListener
from deployments.config import ChannelConfig, ModelConfig
from deployments.generation_calls import GenerationCall, TokenAddress, pack_ids
from deployments.replica.replica_server import ReplicaServer
from deployments.routing.asked import asked_of
from deployments.routing.reporter import ReplicaName
from deployments.routing.watch import ReplicaWatch
from engine.build import build_engine
from engine.request import RequestId, SamplingParams
from tests.deployments.in_process import SECRET, Broadcasted

CHANNEL = ChannelConfig(secret=SECRET, host="127.0.0.1")


class Handle:
    def __init__(self, servers: list[ReplicaServer]) -> None:
        self.servers = servers

    def broadcast(self, method: str, address: TokenAddress) -> Broadcasted:
        return Broadcasted(*(getattr(server, method)(address) for server in self.servers))


async def test_what_a_replica_computed_draws_the_next_request_until_it_dies(tiny_model: ModelConfig) -> None:
    names = ["a", "b"]
    dial = partial(ChannelDialer, CHANNEL)
    servers = [ReplicaServer(build_engine(tiny_model.engine), ReplicaName("chat", name), dial) for name in names]
    watch = ReplicaWatch({"chat": Handle(servers)})  # type: ignore[dict-item]
    listener = ChannelListener(CHANNEL, "gateway", on_report=watch.hear, on_end=watch.lose)
    address = await listener.start()
    board = watch.boards["chat"]
    board.set_replicas(names)
    watch.start(address)

    async def until_heard() -> None:
        while board.wants_reports():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_heard(), 20)
    call = GenerationCall(
        request_id=RequestId("r"),
        prompt_ids=pack_ids(range(3, 80)),
        params=SamplingParams(max_tokens=2, ignore_eos=True),
        reply_to=address,
    )
    listener.subscribe(call.request_id)
    assert (await servers[1].generate(call)).fault is None
    asked = asked_of(call, board.block_tokens)
    assert len(asked.block_marks) == 76 // tiny_model.engine.block_tokens

    async def until_known() -> None:
        while not set(asked.block_marks) <= board._state_by_id["b"].landmarks.keys():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_known(), 20)
    assert board._state_by_id["a"].landmarks.keys() == set()
    await servers[1].stop()

    async def until_lost() -> None:
        while not board.wants_reports():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_lost(), 20)
    assert board.choose(asked, names, asyncio.get_running_loop().time()) == ["a"]
    await servers[0].stop()
    await listener.close()
