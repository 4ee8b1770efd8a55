"""Pure ASGI middleware around every route.

`Border` assigns the request id, answers HEAD on every GET route, refuses requests by their heads, measures the time,
and converts exceptions to OpenAI's error format. `RequestBody` limits the body while it is read, in size and in time,
and cancels the work when the client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors import ApiError, is_our_fault, to_api_error
from app.http.json_route import RECEPTION, error_response, route_path
from deployments.timeline import Reception

STALL_S, PROGRESS_BYTES = 60.0, 16 << 10
"""Time in which a body must end or bring so many more bytes: what has come of it takes memory meanwhile."""

_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_log = logging.getLogger(__name__)


class Border:
    """Sets the request id and processing time; the only place where an unexpected error becomes a 500.

    Ray Serve itself adds `x-request-id` to every response; a second one would reach clients as "id, id".

    Args:
        check: raises if a request is refused; called before the body is read, which would cost memory and time.
    """

    def __init__(self, app: ASGIApp, *, check: Callable[[Request], Awaitable[None]]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        given = Headers(scope=scope).get(_ID_HEADER)
        is_refused = given is not None and _REQUEST_ID.fullmatch(given) is None
        request_id = f"req_{uuid.uuid4().hex}" if given is None or is_refused else given
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[RECEPTION] = Reception()
        # Routes and the functions that they call add headers here.
        response_headers: dict[str, str] = {}
        state["response_headers"] = response_headers
        has_answered = False
        is_head = scope.get("method") == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def send_named(message: Message) -> None:
            nonlocal has_answered
            if message["type"] == "http.response.start":
                has_answered = True
                headers = MutableHeaders(scope=message)
                headers["request-id"] = request_id  # read by Anthropic's clients
                headers["openai-processing-ms"] = str(round((time.perf_counter() - started_s) * 1000))
                headers.setdefault("cache-control", "no-store")
                headers.update(response_headers)
            await send({**message, "body": b""} if is_head and message["type"] == "http.response.body" else message)

        try:
            if is_refused:
                # A generated id would differ from the one in Serve's response header, and nobody could look it up.
                raise ApiError(
                    400,
                    f"'{_ID_HEADER}' must be 1 to 128 visible ASCII characters.",
                    param=_ID_HEADER,
                    code="invalid_value",
                )
            await self._check(Request(scope))
            await self._app(scope, receive, send_named)
        except Exception as error:  # noqa: BLE001 - the ASGI border: logged, then answered
            if is_our_fault(error):
                _log.exception("request %s failed", request_id)
            if not has_answered:
                await error_response(to_api_error(error), scope)(scope, receive, send_named)


class RequestBody:
    """Reads the whole body up to a limit, then cancels the work if the client disconnects.

    Servers differ in whether they cancel a handler on disconnect; this always does, streaming or not.

    Args:
        has_body: whether the body of a request is used; what is sent with others is not kept.
        streamed: method and path of routes that read and limit their bodies themselves.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        has_body: Callable[[Scope], bool],
        streamed: Collection[tuple[str, str]],
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._has_body = has_body
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or (scope.get("method"), route_path(scope)) in self._streamed:
            await self._app(scope, receive, send)
            return
        body = await self._read(scope, receive) if self._has_body(scope) else b""
        if body is None:
            return
        # Anew: how fast a client sends its body is no part of how long it waits for the answer.
        scope["state"][RECEPTION] = Reception()
        has_ended = False

        async def send_watched(message: Message) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        work = asyncio.ensure_future(self._app(scope, _replay(body), send_watched))
        watch = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or has_ended:
                await work
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected before its end."""
        error = ApiError(413, f"The request body is over {self._max_bytes} bytes.", code="request_too_large")
        receive = bounded(scope, receive, self._max_bytes, error)
        pieces = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(pieces)


def bounded(scope: Scope, receive: Receive, max_bytes: int, error: ApiError) -> Receive:
    """Return what receives the body, and raises the error once that is over a bound: at once, if its length says so.

    It raises a 408, too, if the client sends nothing for long, or next to nothing.
    """
    length = Headers(scope=scope).get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise error
    num_bytes = 0
    receive = _unstalled(receive)

    async def receive_bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise error
        return message

    return receive_bounded


def _unstalled(receive: Receive) -> Receive:
    """Return what receives the body, and raises a 408 once it makes no progress; only waiting for the client counts."""
    clock = asyncio.get_running_loop().time
    num_bytes, left_s = 0, STALL_S

    async def receive_soon() -> Message:
        nonlocal num_bytes, left_s
        asked_s = clock()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            words = f"The request body brought less than {PROGRESS_BYTES} bytes in {STALL_S:g} seconds."
            raise ApiError(408, words, code="request_timeout", headers={"connection": "close"}) from None
        num_bytes += len(message.get("body", b""))
        left_s -= clock() - asked_s
        if num_bytes >= PROGRESS_BYTES:
            num_bytes, left_s = 0, STALL_S
        return message

    return receive_soon


def _replay(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # A disconnect cancels the whole call, so it need not be reported here.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    return receive


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
