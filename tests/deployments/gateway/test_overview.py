from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.errors import UnavailableError
from deployments.gateway.overview import PARTS_START_S, Overview
from deployments.handle_calls import ask_all
from deployments.timeline import Timeline
from engine.request import RequestId
from tests.deployments.in_process import Broadcasted, at_once

HANDLE: Any = SimpleNamespace(app_name="ours", deployment_name="Model-base")


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    troubles: list[str | None] = []

    async def ask_all(handle: Any, method: str, *, timeout_s: float) -> list[str | None]:
        return troubles

    monkeypatch.setattr("deployments.gateway.overview.ask_all", ask_all)
    return troubles


def serve_says(monkeypatch: pytest.MonkeyPatch, status: str, replica_states: dict[str, int]) -> None:
    deployment = SimpleNamespace(status=status, replica_states=replica_states)
    application = SimpleNamespace(status="RUNNING", deployments={"Model-base": deployment})
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"ours": application}))


@pytest.mark.parametrize(
    ("status", "replica_states", "state"),
    [
        ("HEALTHY", {}, "ready"),
        ("HEALTHY", {"RUNNING": 1}, "No replica answers."),
        ("UPSCALING", {"STARTING": 1}, "ready"),
        ("DOWNSCALING", {"STOPPING": 1}, "ready"),
        ("UPSCALING", {"RUNNING": 1, "STARTING": 1}, "No replica answers."),
        ("UPDATING", {"STARTING": 1}, "No replica answers."),
        ("UNHEALTHY", {"STARTING": 1}, "No replica answers."),
    ],
)
async def test_a_model_scaled_to_zero_is_ready_and_one_that_lost_its_replicas_is_not(
    replicas: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    replica_states: dict[str, int],
    state: str,
) -> None:
    """With `min_replicas: 0` the whole server was never ready, and `antiphon serve` ended it in the end."""
    serve_says(monkeypatch, status, replica_states)
    assert (await Overview({"base": HANDLE}, {}).health()).state_by_model == {"base": state}


async def test_a_model_scaled_to_zero_stays_ready_while_serve_builds_a_changed_configuration(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve lists no deployments then, and load balancers took every gateway out."""
    serve_says(monkeypatch, "HEALTHY", {})
    overview = Overview({"base": HANDLE}, {})
    assert (await overview.health()).is_ready
    building = SimpleNamespace(status="DEPLOYING", deployments={})
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"ours": building}))
    assert (await overview.health()).is_ready
    assert not (await Overview({"base": HANDLE}, {}).health()).is_ready
    serve_says(monkeypatch, "UNHEALTHY", {})
    assert not (await overview.health()).is_ready
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"ours": building}))
    assert not (await overview.health()).is_ready


async def test_serve_is_asked_once_about_all_that_are_scaled_to_zero(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `status` fails if two threads are in it at once: with two deployments at zero, /health was a 500."""
    serve_says(monkeypatch, "HEALTHY", {})
    status, is_asked = serve.status, threading.Lock()

    def status_of_one() -> Any:
        assert is_asked.acquire(blocking=False), "two at once"
        time.sleep(0.05)
        is_asked.release()
        return status()

    monkeypatch.setattr("ray.serve.status", status_of_one)
    overview = Overview({"base": HANDLE}, {"safety": HANDLE, "tokenizer": HANDLE})
    _, report = await asyncio.gather(overview.until_parts_answer(), overview.health())
    assert report.is_ready


async def test_without_serves_controller_nobody_is_said_to_be_ready(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> None:
        raise RayServeException("no controller")

    monkeypatch.setattr("ray.serve.status", status)
    assert (await Overview({"base": HANDLE}, {}).health()).state_by_model == {"base": "No replica answers."}


async def test_one_replica_that_makes_progress_is_enough(replicas: list[str | None]) -> None:
    replicas += ["it hangs", None]
    assert (await Overview({"base": HANDLE}, {}).health()).is_ready
    replicas.remove(None)
    assert (await Overview({"base": HANDLE}, {}).health()).state_by_model == {"base": "it hangs"}


async def test_a_replica_that_says_nothing_hides_none_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one replica on a machine that had lost its network, no gateway was ready, and no engine had numbers."""
    monkeypatch.setattr("deployments.gateway.overview.PROBE_TIMEOUT_S", 0.01)

    def broadcast(method: str) -> Broadcasted:
        return Broadcasted(asyncio.Event().wait(), at_once(RayServeException("it is gone")), at_once(None))

    handle: Any = SimpleNamespace(app_name="ours", deployment_name="Model-base", broadcast=broadcast)
    assert (await Overview({"base": handle}, {}).health()).is_ready
    assert await ask_all(handle, "traces", timeout_s=0.01) == [None]


async def test_clients_that_ask_for_health_at_once_cost_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 of them kept a gateway busy for a minute, and nine in ten were told that the server was not ready."""
    asked = []

    async def ask_all(handle: Any, method: str, *, timeout_s: float) -> list[None]:
        asked.append(method)
        await asyncio.sleep(0)
        return [None]

    monkeypatch.setattr("deployments.gateway.overview.ask_all", ask_all)
    overview = Overview({"base": HANDLE}, {})
    reports = await asyncio.gather(*(overview.health() for _ in range(100)))
    assert all(report.is_ready for report in reports)
    assert asked == ["trouble"]


async def test_numbers_tell_who_is_ready_however_few_answer(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.gateway.overview.gateways", lambda: HANDLE)
    serve_says(monkeypatch, "UNHEALTHY", {})
    assert b'antiphon:ready{model_name="base",part=""} 0.0' in await Overview({"base": HANDLE}, {}).metrics()


async def test_a_request_is_unknown_only_if_every_gateway_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one gateway that hung, no request was known: a 404 for what another had just answered."""

    async def own_timelines() -> list[Timeline]:
        if is_hanging:
            await asyncio.Event().wait()
        return []

    def broadcast(*args: Any) -> Broadcasted:
        return Broadcasted(own_timelines(), at_once([]))

    handle = SimpleNamespace(deployment_name="Gateway", broadcast=broadcast)
    monkeypatch.setattr("deployments.gateway.overview.gateways", lambda: handle)
    monkeypatch.setattr("deployments.gateway.overview.PROBE_TIMEOUT_S", 0.01)
    is_hanging = True
    with pytest.raises(UnavailableError, match="Gateway"):
        await Overview({}, {}).timelines("r1")
    is_hanging = False
    assert await Overview({}, {}).timelines("r1") == []


async def test_answers_to_a_request_are_told_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a model that is not in the configuration any more, whose engines nobody can ask."""

    def told(arrived_unix_s: float) -> Any:
        found = Timeline(request_id="r.1", model="m", base="gone", arrived_unix_s=arrived_unix_s)
        found.called_s_by_attempt[RequestId(f"a{arrived_unix_s}")] = 0.0
        return at_once([found])

    handle = SimpleNamespace(deployment_name="Gateway", broadcast=lambda *_: Broadcasted(told(2.0), told(1.0)))
    monkeypatch.setattr("deployments.gateway.overview.gateways", lambda: handle)
    found = await Overview({}, {}).timelines("r")
    assert [timeline.arrived_unix_s for timeline in found] == [1.0, 2.0]


async def test_a_gateway_waits_for_its_parts_but_not_for_ever(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began before its classifier had loaded answered with a 503."""
    serve_says(monkeypatch, "UPDATING", {"STARTING": 1})
    monkeypatch.setattr("deployments.gateway.overview.PARTS_POLL_S", 0.01)
    overview = Overview({}, {"safety": HANDLE, "tokenizer": None})
    waiting = asyncio.create_task(overview.until_parts_answer())
    await asyncio.sleep(0.03)
    assert not waiting.done()
    replicas.append("it is slow")
    await waiting
    replicas.clear()
    monkeypatch.setattr("deployments.gateway.overview.PARTS_START_S", 0.03)
    await overview.until_parts_answer()


async def test_a_gateway_waits_for_no_part_that_is_scaled_to_zero(
    replicas: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gateway took 20 seconds longer to start while the tokenizer was at zero."""
    serve_says(monkeypatch, "HEALTHY", {})
    async with asyncio.timeout(PARTS_START_S / 2):
        await Overview({}, {"tokenizer": HANDLE}).until_parts_answer()


async def test_a_gateway_can_ask_the_others_before_serve_s_controller_may_be_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first scrape of a gateway whose head was lost stopped all of its streams."""
    connected: list[None] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("deployments.gateway.overview.gateways", lambda: connected.append(None))
    await Overview({}, {}).until_parts_answer()
    assert len(connected) == 1
