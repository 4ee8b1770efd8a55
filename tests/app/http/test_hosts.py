from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from app.access.tenants import KeyRing, Tenant
from app.http.api import create_app
from app.http.hosts import HostRule, OriginRule
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


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://models.example", "models.example", True),
        ("https://models.example", "Models.example:443", True),
        ("https://listed.example", "localhost:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://localhost", "localhost:8000", False),
        ("https://evil.example", "localhost:8000", False),
        ("http://localhost:8000.evil.example", "localhost:8000", False),
        ("null", "null", False),
        ("null", "localhost:8000", False),
        ("chrome-extension://abcdef", "localhost:8000", True),
        ("app://obsidian.md", "localhost:8000", True),
        ("HTTPS://evil.example", "localhost:8000", False),
        ("", "", False),
        ("evil", "evil", False),
    ],
)
def test_a_page_changes_what_is_its_own_server_s_or_lists_it(origin: str, host: str, is_allowed: bool) -> None:
    rule = OriginRule.of(["https://listed.example"], is_open=True)
    headers = Headers({"origin": origin, "host": host})
    assert rule.allows("POST", headers) is rule.allows("DELETE", headers) is is_allowed
    assert all(rule.allows(method, headers) for method in ("GET", "HEAD", "OPTIONS"))
    assert OriginRule.of(["*"], is_open=True).allows("POST", headers)
    assert rule.allows("POST", Headers({"host": host}))
    # A proxy has changed `Host`, and the browser knows that the page is the server's own.
    assert rule.allows("POST", headers.mutablecopy() | {"sec-fetch-site": "same-origin"})


@pytest.mark.parametrize("url", ["/v1/files", "/v1/batches/batch_a/cancel", "/v1/chat/completions"])
async def test_a_foreign_page_changes_nothing_on_an_open_server(url: str) -> None:
    """Forms and empty bodies come without a question beforehand (no preflight)."""
    for ring, is_refused in ((KeyRing(), True), (KeyRing(tenant_by_name={"a": Tenant(name="a")}), False)):
        app = create_app(ScriptedGateway(), host_rule=HostRule.of(None, is_open=True), key_ring=ring)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost:8000"
        ) as client:
            for origin in ("https://evil.example", "null", "http://localhost:3000"):
                told = await client.post(url, files={"file": b"x"}, headers={"origin": origin})
                assert (told.status_code == 403) is is_refused
                assert (told.json()["error"]["code"] == "origin_not_allowed") is is_refused
            own = await client.post(url, files={"file": b"x"}, headers={"origin": "http://localhost:8000"})
            assert own.status_code != 403
