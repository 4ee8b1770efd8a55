from __future__ import annotations

from importlib.metadata import version

import httpx

from deployments.generation import HealthReport
from tests.app.scripted_gateway import ScriptedGateway


async def test_health_is_200_when_ready_and_503_when_not(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ready", "models": {"base": "ready"}, "parts": {}},
    )
    gateway.health_report = HealthReport(state_by_model={"base": "no replica: /opt/x/y.py failed"})
    assert (await client.post("/ping")).status_code == (await client.get("/ping")).status_code == 503
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unready", "models": {"base": "no replica: [path] failed"}, "parts": {}}
    gateway.health_report = HealthReport(
        state_by_model={"base": "ready"}, state_by_part={"safety": "No replica answers."}
    )
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["parts"] == {"safety": "No replica answers."}


async def test_metrics_are_prometheus_text(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text.startswith("# HELP")


async def test_the_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": version("antiphon")}
