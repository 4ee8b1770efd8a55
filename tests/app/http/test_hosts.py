from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.http.api import create_app
from app.http.hosts import HostRule
from tests.app.scripted_gateway import ScriptedGateway

LOCAL = ["localhost", "LOCALHOST:8000", "api.localhost", "127.0.0.1:8000", "10.0.0.7", "[::1]:8000", "[::1]"]
FOREIGN = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil.example/health?", "", "a b"]


@pytest.mark.parametrize("header", [*LOCAL, *FOREIGN])
def test_a_server_with_keys_answers_to_any_name(header: str) -> None:
    assert HostRule.of(None, is_open=False).allows(header)


def test_an_open_server_answers_to_addresses_and_localhost_only() -> None:
    rule = HostRule.of(None, is_open=True)
    assert all(map(rule.allows, LOCAL))
    assert not any(map(rule.allows, FOREIGN))


@pytest.mark.parametrize("is_open", [True, False])
def test_names_of_the_configuration_count_for_both(is_open: bool) -> None:
    rule = HostRule.of(["Models.example.org", "*.inner.example"], is_open=is_open)
    assert all(map(rule.allows, [*LOCAL, "models.example.org:443", "a.inner.example", "a.b.inner.example."]))
    assert not any(map(rule.allows, [*FOREIGN, "example.org", "inner.example", "xinner.example"]))


async def test_a_request_for_somebody_else_is_refused_in_openai_s_shape() -> None:
    app = create_app(ScriptedGateway(), host_rule=HostRule.of(None, is_open=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://evil.example") as client:
        response = await client.get("/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed")
    assert "allowed_hosts" in response.json()["error"]["message"]
    assert response.headers["request-id"]


async def test_a_health_check_without_a_host_is_answered() -> None:
    """Load balancers send them by HTTP/1.0."""
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    messages = [{"type": "http.request"}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    app = create_app(ScriptedGateway(), host_rule=HostRule.of(None, is_open=True))
    scope = {"type": "http", "http_version": "1.0", "method": "GET", "path": "/health", "headers": []}
    await app({**scope, "query_string": b"", "state": {}}, receive, send)
    assert told[0]["status"] == 200
