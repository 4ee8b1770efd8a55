"""The router as Serve drives it, with replicas that are only queue lengths."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from deployments.generation_calls import GenerationCall, pack_ids
from deployments.routing.asked import Asked, asked_of
from deployments.routing.board import Board, board_of
from deployments.routing.report import LoadReport
from deployments.routing.router import MAX_RANKS, SPARE_CALLS, FirstTokenRouter
from engine.request import RequestId, SamplingParams

DEPLOYMENT = DeploymentID(name="Model-m", app_name="app")


@dataclass
class FakeReplica:
    name: str
    num_open: int = 0
    max_ongoing_requests: int = 4

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_open


class Routed:
    """A router whose replicas have reported."""

    def __init__(self, *names: str) -> None:
        self.router = FirstTokenRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(model="m", max_generations=4)
        self.board: Board = board_of("m")
        self.replicas = {name: FakeReplica(name) for name in names}
        self.router.update_replicas(list(self.replicas.values()))

    def hear(self, name: str, **numbers: Any) -> None:
        fields = {"landmark_blocks": 1, "max_running": 8, "prefill_tokens_per_s": 100.0, "is_whole": True} | numbers
        report = LoadReport(model="m", replica_id=name, **fields)
        self.board.hear(report, asyncio.get_running_loop().time(), name)

    async def place(self, *call: object, internal_id: str = "one") -> str:
        chosen = await asyncio.wait_for(self.router._choose_replica_for_request(pending_of(*call, id_=internal_id)), 10)
        return str(chosen.replica_id.unique_id)


def pending_of(*call: object, id_: str = "one") -> PendingRequest:
    metadata = RequestMetadata(request_id="http", internal_request_id=id_)
    return PendingRequest(args=list(call), kwargs={}, metadata=metadata)


def call_of(request_id: str, tokens: range = range(100)) -> GenerationCall:
    return GenerationCall(
        request_id=RequestId(request_id), prompt_ids=pack_ids(tokens), params=SamplingParams(max_tokens=1)
    )


async def test_a_prompt_goes_where_its_prefix_is() -> None:
    routed = Routed("a", "b", "c")
    marks = asked_of(call_of("x"), 16).block_marks
    for name in "abc":
        routed.hear(name, landmarks_added=marks if name == "b" else ())
    assert await routed.place(call_of("r")) == "b"
    assert len(routed.board._replica_by_request) == 1


async def test_calls_of_one_http_request_each_get_a_replica() -> None:
    """Serve gives them one id, and by that alone it would find only the first."""
    routed = Routed("a", "b")
    routed.hear("a")
    routed.hear("b")
    calls = [call_of(f"r{i}", range(1000 * i, 1000 * i + 100)) for i in range(4)]
    assert sorted(await asyncio.gather(*map(routed.place, calls))) == ["a", "a", "b", "b"]
    assert len(routed.router._pending_requests_by_id) == 0


async def test_who_is_full_is_passed_over() -> None:
    routed = Routed("a", "b")
    routed.hear("a", landmarks_added=asked_of(call_of("x"), 16).block_marks)
    routed.hear("b")
    routed.replicas["a"].num_open = 4
    routed.router.on_new_queue_len_info(routed.replicas["a"].replica_id, 4)
    assert await routed.place(call_of("r")) == "b"
    # What is counted is where it went: lost there, the next attempt goes elsewhere.
    routed.replicas["a"].num_open = 0
    routed.router.on_new_queue_len_info(routed.replicas["a"].replica_id, 0)
    routed.board.lose_request("r", asyncio.get_running_loop().time())
    assert await routed.place(call_of("r-1", range(500, 900))) == "a"


async def test_a_prompt_is_read_once_however_often_it_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all replicas were full, each waiting prompt was hashed again several times a second."""
    routed, pending, read = Routed("a", "b"), pending_of(call_of("r")), list[str]()

    def noted(call: GenerationCall, block_tokens: int) -> Asked:
        read.append(call.request_id)
        return asked_of(call, block_tokens)

    monkeypatch.setitem(FirstTokenRouter._asked_of.__globals__, "asked_of", noted)
    for _ in range(3):
        await routed.router.choose_replicas(list(routed.replicas.values()), pending)
    assert read == ["r"]
    pending.future.set_result(None)
    await asyncio.sleep(0)
    assert routed.router._asked == {}


async def test_many_are_tried_one_by_one_and_then_together() -> None:
    routed = Routed(*map(str, range(MAX_RANKS + 2)))
    ranks = await routed.router.choose_replicas(list(routed.replicas.values()), pending_of(call_of("r")))
    assert [len(rank) for rank in ranks] == [1] * MAX_RANKS + [2]


async def test_a_call_whose_caller_is_gone_counts_nowhere() -> None:
    """Serve notices a moment later, and its end has been reported."""
    routed = Routed("a", "b")
    pending = pending_of(call_of("r"))
    pending.future.cancel()
    assert await routed.router.choose_replicas(list(routed.replicas.values()), pending) == []
    assert len(routed.board._replica_by_request) == 0


async def test_the_dead_are_not_chosen_and_all_dead_are_waited_for() -> None:
    routed = Routed("a", "b")
    routed.hear("a")
    routed.hear("b", queued_tokens=10_000)
    routed.board.lose_source("a", asyncio.get_running_loop().time())
    assert await routed.place(call_of("r1")) == "b"
    routed.board.lose_source("b", asyncio.get_running_loop().time())
    waiting = asyncio.create_task(routed.place(call_of("r2"), internal_id="two"))
    # Without pauses, it would hold up everything else in this process.
    while not routed.router.num_routing_tasks_in_backoff:
        await asyncio.sleep(0)
    assert not waiting.done()
    routed.hear("b")
    assert await waiting == "b"
    assert routed.board.unheard()
    routed.router.on_replica_actor_died(routed.replicas["a"].replica_id)
    assert not routed.board.unheard()
    assert await routed.place(call_of("r3")) == "b"


async def test_one_replica_and_other_calls_cost_nothing() -> None:
    routed = Routed("a")
    assert await routed.place(call_of("r")) == "a"
    assert not routed.board.unheard()
    routed.router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    assert await routed.place("something else") in ("a", "b")
    assert await routed.place() in ("a", "b")
    assert len(routed.board._replica_by_request) == 0
    assert routed.board.unheard()


def test_serve_can_carry_it_to_another_process() -> None:
    """By value, without what this process knows: there it finds the board by name."""
    config = RequestRouterConfig(
        request_router_class="deployments.routing.router.FirstTokenRouter",
        request_router_kwargs={"model": "m", "max_generations": 4},
    )
    carried = config.get_request_router_class()
    assert carried.__name__ == "FirstTokenRouter"
    assert carried.initialize_state.__globals__["board_of"] is board_of


@pytest.mark.parametrize(("max_calls", "max_generations"), [(4 + SPARE_CALLS, 4), (3, 3)])
async def test_generations_leave_places_for_questions_about_health(
    monkeypatch: pytest.MonkeyPatch, max_calls: int, max_generations: int
) -> None:
    """Broadcasts waited in a full replica until an answer ended."""
    monkeypatch.setattr(RunningReplicaInfo, "get_actor_handle", lambda self: None)
    info = RunningReplicaInfo(
        replica_id=ReplicaID("a", DEPLOYMENT),
        node_id=None,
        node_ip=None,
        availability_zone=None,
        actor_name="a",
        max_ongoing_requests=max_calls,
    )
    assert Routed().router.create_replica_wrapper(info).max_ongoing_requests == max_generations
