from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlparse

import orjson
import pytest

import app.http.sse as sse_module
from app.http.api import create_app
from app.http.sse import EventStream
from app.schemas.completions import CompletionRequest
from app.translation.chunks import CompletionFrames
from app.translation.render import ResponseHead
from app.translation.streaming import EventBatches
from deployments.answer_events import TextDelta
from tests.app.scripted_gateway import ScriptedGateway
from tests.app.serving import serving
from tests.app.translation.test_streaming import END, STARTED, Source

BODY_BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/completions": {"prompt": "Hi"},
}


async def test_events_that_are_ready_together_are_one_write() -> None:
    source = Source(STARTED, *[TextDelta(text="x")] * 20, END)
    events = await EventBatches([source.run()]).open()
    for _ in range(3):
        await _turn()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await _stream_of(events)({"type": "http"}, _never, send)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body" and message["body"]]
    assert len(bodies) <= 3
    assert b"".join(bodies).count(b"data: ") == 22
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert source.is_closed


async def test_a_client_that_reads_nothing_for_a_while_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ended it: its answer ran, and its tenant's place was taken, until the proxy gave up after an hour."""
    monkeypatch.setattr(sse_module, "STALL_S", 0.01)
    source = Source(STARTED, *[TextDelta(text="x")] * 1000, END)
    events = await EventBatches([source.run()]).open()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await _stream_of(events)({"type": "http"}, _never, send)
    assert source.is_closed
    assert [message.get("more_body") for message in sent] == [None, True, True]


@pytest.mark.parametrize("path", BODY_BY_PATH)
async def test_an_answer_ends_by_its_deadline_even_if_its_client_does_not_read(path: str) -> None:
    gateway = ScriptedGateway()
    gateway.deltas = [TextDelta(text="x" * 60_000)] * 1000
    with serving(create_app(gateway, default_timeout_s=0.2)) as url:
        reader, writer = await _asked(url, path)
        await _until_closed(gateway)
        assert [request.timeout_s for request in gateway.requests] == [0.2]
        # It reads on within `STALL_S`, and is told.
        told = (await reader.read()).rpartition(b"data: ")[2]
        assert b"deadline" in told
        writer.close()


async def test_a_connection_whose_client_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_module, "STALL_S", 0.1)
    gateway = ScriptedGateway()
    gateway.deltas = [TextDelta(text="x" * 60_000)] * 1000
    with serving(create_app(gateway)) as url:
        reader, writer = await _asked(url, "/v1/chat/completions")
        await _until_closed(gateway)
        told = await reader.read()
        assert not told.endswith(b"0\r\n\r\n")
        writer.close()


async def _asked(url: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream over a connection that buffers little, and read nothing of it."""
    address = urlparse(url)
    body = orjson.dumps({"model": "base", "stream": True} | BODY_BY_PATH[path])
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def _until_closed(gateway: ScriptedGateway) -> None:
    async with asyncio.timeout(10):
        while not gateway.requests or gateway.num_open:
            await asyncio.sleep(0.01)


def _stream_of(events: EventBatches) -> EventStream:
    head = ResponseHead(response_id="cmpl-1", created_s=2, model="m")
    frames = CompletionFrames(head, CompletionRequest(model="m", prompt="?"))
    return EventStream(events, frames, request_id="r")


async def _turn() -> None:
    await asyncio.sleep(0)


async def _never() -> Any:
    raise AssertionError("a stream does not read")
