from __future__ import annotations

from typing import Any

from app.http.sse import EventStream
from app.schemas.completions import CompletionRequest
from app.translation.chunks import CompletionFrames
from app.translation.render import ResponseHead
from app.translation.streaming import EventBatches
from deployments.answer_events import TextDelta
from tests.app.translation.test_streaming import END, STARTED, Source


async def test_events_that_are_ready_together_are_one_write() -> None:
    source = Source(STARTED, *[TextDelta(text="x")] * 20, END)
    events = await EventBatches([source.run()]).open()
    for _ in range(3):
        await _turn()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    head = ResponseHead(response_id="cmpl-1", created_s=2, model="m")
    frames = CompletionFrames(head, CompletionRequest(model="m", prompt="?"))
    stream = EventStream(events, frames, request_id="r")
    await stream({"type": "http"}, _never, send)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body" and message["body"]]
    assert len(bodies) <= 3
    assert b"".join(bodies).count(b"data: ") == 22
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert source.is_closed


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)


async def _never() -> Any:
    raise AssertionError("a stream does not read")
