"""Events -> the bytes of a server-sent stream; nothing else knows `data:`.

One frame of a chat stream, with the usage asked for (one line, then an empty one):

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
           "delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import ApiError, is_our_fault, to_api_error
from app.render import ResponseHead, usage
from app.streaming import ChoiceEvent, EventBatches
from deployments.generation import Finished, TextDelta

DONE = b"data: [DONE]\n\n"

_log = logging.getLogger(__name__)


class StreamFrames(Protocol):
    """The wire format of one kind of stream."""

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event."""
        ...

    def closing(self) -> bytes:
        """Return what follows the last event."""
        ...


class _Frames:
    """What the two kinds of streams share: the head of a chunk, and the chunk of counts."""

    def __init__(self, head: ResponseHead, *, kind: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {
            "id": head.response_id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }
        self._include_usage = include_usage
        self._finished: list[Finished] = []

    def closing(self) -> bytes:
        """Return the chunk of counts, where it is asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = usage(self._finished).model_dump(mode="json")
        return _frame(self._head | {"choices": [], "usage": counts}) + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._head | {"choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return _frame(chunk)


class ChatFrames(_Frames):
    """Chunks of a chat: the role, pieces of content, an empty delta with the finish reason."""

    def __init__(self, head: ResponseHead, *, include_usage: bool) -> None:
        super().__init__(head, kind="chat.completion.chunk", include_usage=include_usage)
        self._opened: set[int] = set()

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event; the first of a choice brings its role."""
        frames = b""
        if item.index not in self._opened:
            self._opened.add(item.index)
            frames = self._delta(item.index, {"role": "assistant", "content": "", "refusal": None})
        if isinstance(item.event, TextDelta):
            frames += self._delta(item.index, {"content": item.event.text})
        elif isinstance(item.event, Finished):
            self._finished.append(item.event)
            if item.event.refusal is not None:
                frames += self._delta(item.index, {"refusal": item.event.refusal})
            frames += self._delta(item.index, {}, item.event.reason.value)
        return frames

    def _delta(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason})


class CompletionFrames(_Frames):
    """Chunks of text completions: pieces of text, then an empty one with the finish reason."""

    def __init__(self, head: ResponseHead, *, include_usage: bool) -> None:
        super().__init__(head, kind="text_completion", include_usage=include_usage)

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event."""
        if isinstance(item.event, TextDelta):
            return self._text(item.index, item.event.text, None)
        if isinstance(item.event, Finished):
            self._finished.append(item.event)
            return self._text(item.index, "", item.event.reason.value)
        return b""

    def _text(self, index: int, text: str, finish_reason: str | None) -> bytes:
        return self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason})


class EventStream(Response):
    """Streams opened `EventBatches`, one write for each batch, and closes them however it ends.

    An error in mid-stream becomes one event with a top-level `error`, after which the stream ends without `[DONE]`.
    """

    def __init__(self, events: EventBatches, frames: StreamFrames, *, request_id: str) -> None:
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._frames = frames
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._writes():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.close()

    async def _writes(self) -> AsyncIterator[bytes]:
        try:
            async for batch in self._events.batches():
                data = b"".join(self._frames.event(item) for item in batch)
                if data:
                    yield data
            yield self._frames.closing()
        except Exception as error:  # noqa: BLE001 - the status is sent: the stream is the only place to say it
            if is_our_fault(error):
                _log.exception("stream of request %s failed", self._request_id)
            yield error_frame(to_api_error(error))


def error_frame(error: ApiError) -> bytes:
    """Return the event that ends a failed stream."""
    return _frame(error.body())


def _frame(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
