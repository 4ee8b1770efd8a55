"""Send events as a server-sent event stream, in the format of any API; only this module knows `data:`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.http.errors import ApiError, is_our_fault, to_api_error
from app.http.field_names import FieldName, renamed_fields
from app.translation.streaming import ChoiceEvent, EventBatches

DONE = b"data: [DONE]\n\n"
STALL_S = 60.0
"""Seconds that a write may wait for its client to read; nginx waits as long (`send_timeout`).

A stopped client keeps its connection, so nothing else would end its answer before the proxy does, after an hour.
"""

_log = logging.getLogger(__name__)


class StreamFrames(Protocol):
    """The wire format of one kind of stream."""

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event."""
        ...

    def closing(self) -> bytes:
        """Return the frames after the last event."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the frames that end a failed stream."""
        ...


class EventStream(Response):
    """Streams opened `EventBatches`, one write per batch, and always closes them at the end.

    An error in mid-stream is written as the format's error event, and the stream ends without an end mark. If the
    client reads nothing for `STALL_S`, the stream breaks off.

    Args:
        names: as `renamed_fields` takes them, for errors in mid-stream.
    """

    def __init__(
        self,
        events: EventBatches,
        frames: StreamFrames,
        *,
        request_id: str,
        names: Mapping[str, FieldName] | None = None,
    ) -> None:
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
        self._names = names or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await _sent(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._writes():
                await _sent(send, {"type": "http.response.body", "body": data, "more_body": True})
            await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # The server closes the connection of a response without an end.
            _log.info("request %s: its client has read nothing for %g s", self._request_id, STALL_S)
        finally:
            await self._events.close()

    async def _writes(self) -> AsyncIterator[bytes]:
        try:
            with renamed_fields(self._names):
                async for batch in self._events.batches():
                    data = b"".join(self._frames.event(item) for item in batch)
                    if data:
                        yield data
            yield self._frames.closing()
        except Exception as error:  # noqa: BLE001 - the status is already sent: only the stream can report it
            if is_our_fault(error):
                _log.exception("stream of request %s failed", self._request_id)
            yield self._frames.failure(to_api_error(error))


async def _sent(send: Send, message: Message) -> None:
    async with asyncio.timeout(STALL_S):
        await send(message)


def typed_frame(kind: str, /, **fields: Any) -> bytes:
    """Return an event with a separate `event:` line for its type, as in the Responses and Messages APIs."""
    return b"event: " + kind.encode() + b"\n" + frame({"type": kind} | fields)


def frame(value: object) -> bytes:
    """Return an event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
