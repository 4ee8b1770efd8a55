from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.http.middleware import PROGRESS_BYTES, Border, RequestBody
from tests.app.scripted_gateway import ScriptedGateway

GOOD = b'{"model":"base","messages":[{"role":"user","content":"Hi"}]}'
JSON = {"content-type": "application/json"}


async def test_a_request_id_is_kept_and_who_brings_none_gets_one(client: httpx.AsyncClient) -> None:
    for given in ("a.B-9_", "host/a1:2", "x" * 128):
        assert (await client.get("/health", headers={"x-request-id": given})).headers["request-id"] == given
    unnamed = (await client.get("/nope")).headers
    assert unnamed["request-id"].startswith("req_")


@pytest.mark.parametrize("wrong", [b"", b"a b", b"x" * 129, b"a\tb", b"\xc3\xa9"])
async def test_a_request_id_that_nobody_could_look_for_is_refused(client: httpx.AsyncClient, wrong: bytes) -> None:
    response = await client.get("/health", headers={b"x-request-id": wrong})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
    assert "1 to 128 visible ASCII" in response.json()["error"]["message"]
    assert response.headers["request-id"].startswith("req_")


async def test_every_answer_says_how_long_it_took_and_is_not_cached(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models")
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/base", "/v1/models/nope", "/nope"])
async def test_a_head_is_the_get_without_its_body(client: httpx.AsyncClient, path: str) -> None:
    got, asked = await client.get(path), await client.head(path)
    assert asked.status_code == got.status_code
    assert asked.headers["content-length"] == got.headers["content-length"]
    assert (bool(got.content), asked.content) == (True, b"")
    assert (await client.head("/v1/chat/completions")).status_code == 405


async def test_two_requests_with_one_id_are_two_generations(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    for _ in range(2):
        await client.post("/v1/chat/completions", content=GOOD, headers=JSON | {"x-request-id": "same"})
    ids = [request.request_id for request in gateway.requests]
    assert len(set(ids)) == 2
    assert all(request_id.startswith("same.") for request_id in ids)


async def test_a_body_over_the_bound_is_a_413_with_and_without_its_length(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    for content in (b" " * 30_000, chunks()):
        response = await client.post("/v1/chat/completions", content=content, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert "20000" in response.json()["error"]["message"]


async def test_a_bound_body_in_pieces_is_read_whole(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(GOOD), 7):
            yield GOOD[at : at + 7]

    assert (await client.post("/v1/chat/completions", content=pieces(), headers=JSON)).status_code == 200


async def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    num_read = 0

    async def receive() -> Any:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    sent: list[Any] = []
    app = Border(RequestBody(_no_app, max_bytes=1000, has_body=_has_body, streamed=()), check=_no_check)
    await app({"type": "http", "path": "/", "headers": []}, receive, _collector(sent))
    assert sent[0]["status"] == 413
    assert num_read == 11


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/nowhere", 404),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/openapi.json", 405),
        ("POST", "/ping", 200),
        ("GET", "/", 200),
        ("GET", "/v1/models", 200),
    ],
)
async def test_a_body_that_no_route_wants_is_not_waited_for(app: FastAPI, method: str, path: str, status: int) -> None:
    """It was kept up to the bound for as long as its sender liked, who needed no key."""

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    sent: list[Any] = []
    await app(_scope(method, path), receive, _collector(sent))
    assert sent[0]["status"] == status


async def test_a_body_that_makes_no_progress_is_a_408(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for without end."""
    times, receive = _slow_body(monkeypatch, pause_s=25.0, num_bytes=1)
    sent: list[Any] = []
    await app(_scope("POST", "/v1/chat/completions"), receive, _collector(sent))
    assert (sent[0]["status"], times) == (408, [0, 25, 50, 75])
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"request_timeout" in sent[1]["body"]


async def test_a_body_that_comes_slowly_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    times, receive = _slow_body(monkeypatch, pause_s=50.0, num_bytes=PROGRESS_BYTES)
    sent: list[Any] = []
    app = Border(RequestBody(_no_app, max_bytes=20 * PROGRESS_BYTES, has_body=_has_body, streamed=()), check=_no_check)
    await app(_scope("POST", "/"), receive, _collector(sent))
    assert (sent[0]["status"], len(times)) == (413, 22)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_generation(app: FastAPI, gateway: ScriptedGateway, stream: bool) -> None:
    gateway.never_ends = True
    left = asyncio.Event()
    messages: list[Any] = [
        {"type": "http.request", "body": GOOD[:-1] + b',"stream":%s}' % str(stream).lower().encode()}
    ]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    sent: list[Any] = []
    task = asyncio.create_task(app(_scope("POST", "/v1/chat/completions"), receive, _collector(sent)))
    while not gateway.num_open or (stream and len(sent) < 2):
        await asyncio.sleep(0)
    left.set()
    await task
    assert gateway.num_open == 0


async def test_a_client_that_leaves_in_its_body_is_let_go() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    app = RequestBody(_no_app, max_bytes=10, has_body=_has_body, streamed=())
    await app({"type": "http", "path": "/", "headers": []}, receive, _collector([]))


async def test_an_unforeseen_error_is_logged_with_its_request_and_told_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("/etc/secret")

    sent: list[Any] = []
    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", b"r-1")]}
    with caplog.at_level(logging.ERROR):
        await Border(broken, check=_no_check)(scope, _no_receive, _collector(sent))
    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]
    assert "r-1" in caplog.text
    assert "secret" in caplog.text


def _has_body(scope: Any) -> bool:
    return True


async def _no_check(request: Any) -> None:
    """Refuse nobody."""


def _scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip


def _slow_body(monkeypatch: pytest.MonkeyPatch, *, pause_s: float, num_bytes: int) -> tuple[list[float], Any]:
    """Return when pieces were asked for, after a first 0, and what receives a body of such pieces without end.

    The event loop's clock moves only with these pieces.
    """
    times = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: times[-1])

    async def receive() -> Any:
        times.append(times[-1] + pause_s)
        # First the loop finds that time has passed; then it tells who waits.
        for _ in range(3):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": True}

    return times, receive


def _collector(sent: list[Any]) -> Any:
    async def send(message: Any) -> None:
        sent.append(message)

    return send


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("must not be called")


async def _no_receive() -> Any:
    raise AssertionError("must not be called")
