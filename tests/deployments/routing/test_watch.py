"""Two real replicas, a real channel, and the board between: only Serve's handle is a stand-in."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from deployments.channel.token_channel import ChannelDialer, ChannelListener
from deployments.config import ChannelConfig, ModelConfig
from deployments.generation_calls import GenerationCall, TokenAddress, pack_ids
from deployments.replica.replica_server import ReplicaServer
from deployments.routing import watch as watch_module
from deployments.routing.asked import asked_of
from deployments.routing.report import LoadReport
from deployments.routing.reporter import ReplicaName
from deployments.routing.watch import ReplicaWatch
from engine.build import build_engine
from engine.request import RequestId, SamplingParams
from tests.deployments.in_process import SECRET, Broadcasted

CHANNEL = ChannelConfig(secret=SECRET, host="127.0.0.1")


class Handle:
    def __init__(self, servers: list[ReplicaServer]) -> None:
        self.servers = servers

    def broadcast(self, method: str, *arguments: object) -> Broadcasted:
        return Broadcasted(*(getattr(server, method)(*arguments) for server in self.servers))


async def test_only_replicas_that_were_not_heard_are_asked_and_of_models_that_have_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "POLL_S", 0)
    asked: list[str] = []

    async def note(name: str) -> None:
        asked.append(name)

    handles = {
        name: SimpleNamespace(broadcast=lambda *_, name=name: Broadcasted(note(name))) for name in ("one", "two")
    }
    watch = ReplicaWatch(handles)  # type: ignore[arg-type]
    watch.boards["one"].set_replicas(["a"])
    watch.boards["two"].set_replicas(["a", "b"])
    watch.start(TokenAddress(gateway_id="gateway", host="", port=1))
    while len(asked) < 3:
        await asyncio.sleep(0)
    assert set(asked) == {"two"}
    for name in "ab":
        watch.hear(LoadReport(model="two", replica_id=name, is_whole=True), name)
    watch.hear(LoadReport(model="of another build", replica_id="a", is_whole=True), "a")
    num_asked = len(asked)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(asked) <= num_asked + 1


def test_replicas_that_stay_unheard_are_asked_ever_less_often_and_new_ones_at_once() -> None:
    """Where one could not dial the gateway, all were asked for their whole reports four times a second, for ever."""
    pace, now_s, asked_s = watch_module._Pace(), 0.0, list[float]()
    while now_s < 1000:
        if pace.is_due(frozenset("a"), now_s):
            asked_s.append(now_s)
        now_s += watch_module.POLL_S
    pauses = [after - before for before, after in pairwise(asked_s)]
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert set(pauses[8:]) == {watch_module.MAX_PAUSE_S}
    assert pace.is_due(frozenset("ab"), now_s)
    assert not pace.is_due(frozenset("ab"), now_s)
    assert not pace.is_due(frozenset(), now_s)
    assert pace.is_due(frozenset("a"), now_s)


async def test_a_round_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New replicas would not have been heard any more, and so looked idle."""
    monkeypatch.setattr(watch_module, "POLL_S", 0)
    failures, asked = [ZeroDivisionError()], asyncio.Event()

    def broadcast(*_: object) -> Broadcasted:
        if failures:
            raise failures.pop()
        asked.set()
        return Broadcasted()

    watch = ReplicaWatch({"chat": SimpleNamespace(broadcast=broadcast)})  # type: ignore[dict-item]
    watch.boards["chat"].set_replicas(["a", "b"])
    watch.start(TokenAddress(gateway_id="gateway", host="", port=1))
    await asyncio.wait_for(asked.wait(), 20)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


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
        while board.unheard():
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
        while not board.unheard():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_lost(), 20)
    assert board.choose(asked, names, asyncio.get_running_loop().time()) == ["a"]
    await servers[0].stop()
    await listener.close()
