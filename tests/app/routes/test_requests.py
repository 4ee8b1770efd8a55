from __future__ import annotations

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, key_digest
from app.http.api import create_app
from app.routes.requests import RequestTimeline
from deployments.timeline import Arrival, Arrivals, Stage, Timeline
from tests.app.scripted_gateway import ScriptedGateway

TIMELINE = Timeline(
    request_id="r1.abc",
    model="base",
    base="base",
    tenant="blue",
    arrived_unix_s=1000.0,
    stages=[Stage("tokenize", 0.0, 0.001), Stage("decode", 0.01, 0.02)],
    arrivals=Arrivals([Arrival(0.01, 1), Arrival(0.02, 2)]),
    num_prompt_tokens=5,
    num_tokens=3,
    first_token_s=0.01,
    end_s=0.02,
    outcome="stop",
)


@pytest.fixture
def guarded(gateway: ScriptedGateway) -> httpx.AsyncClient:
    """A server with two tenants and an admin."""
    ring = KeyRing(
        tenant_by_name={name: Tenant(name=name) for name in ("blue", "red")},
        name_by_digest={key_digest(name): name for name in ("blue", "red")},
    )
    app = create_app(gateway, key_ring=ring, admin_key_sha256=key_digest("boss"))
    gateway.known_timelines["r1"] = [TIMELINE]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


@pytest.mark.parametrize("key", ["blue", "boss"])
async def test_a_request_is_told_to_its_tenant_and_to_the_admin(guarded: httpx.AsyncClient, key: str) -> None:
    response = await guarded.get("/requests/r1", headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200
    [answer] = RequestTimeline.model_validate(response.json()).answers
    assert (answer.ttft_ms, answer.tpot_ms, answer.total_ms, answer.outcome) == (10.0, 5.0, 20.0, "stop")
    assert [(stage.name, stage.start_ms, stage.end_ms) for stage in answer.stages] == [
        ("tokenize", 0.0, 1.0),
        ("decode", 10.0, 20.0),
    ]
    assert answer.arrivals == [(10.0, 1), (20.0, 2)]
    assert answer.adapter is None


async def test_a_client_s_own_id_may_have_a_slash(guarded: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.known_timelines["host/r1"] = [TIMELINE]
    response = await guarded.get("/requests/host%2Fr1", headers={"authorization": "Bearer blue"})
    assert (response.status_code, response.json()["id"]) == (200, "host/r1")


@pytest.mark.parametrize(("key", "name"), [("red", "r1"), ("blue", "r2"), ("boss", "r2")])
async def test_what_is_another_s_or_nobody_s_is_not_found(guarded: httpx.AsyncClient, key: str, name: str) -> None:
    response = await guarded.get(f"/requests/{name}", headers={"authorization": f"Bearer {key}"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_stranger_is_not_let_in(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.get("/requests/r1")).status_code == 401
    assert (await guarded.get("/requests/" + "x" * 200, headers={"authorization": "Bearer blue"})).status_code == 400
