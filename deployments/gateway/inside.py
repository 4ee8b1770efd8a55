"""Requests that the server makes to its own application on behalf of a tenant whose key it does not know.

The application runs in the gateway's process as for HTTP, with the same routes, limits and errors. The tenant is passed
in the ASGI scope (`INSIDE`), which no client can write to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.batches.values import InsideAnswer, InsideCall
from deployments.errors import error_body

T = TypeVar("T")

INSIDE = "inside"
"""Key in `scope["state"]` of the tenant's name, which is empty if there are no tenants."""
BATCH_PRIORITY = 2**33
"""Added to each request's priority value: more than a client can subtract, so batches rank below all other requests."""

TIMEOUT_HEADER = "x-request-timeout"
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0
BEAT_S = 5.0
MAX_ANSWER_BYTES = 4_000_000
"""Bound on what Serve returns in one message: 4 MiB, unless `antiphon serve` has set more."""
_TOO_LARGE = error_body(
    f"The answer is over {MAX_ANSWER_BYTES} bytes, which a line of a batch may not be.",
    kind="invalid_request_error",
    code="answer_too_large",
)


async def answer_inside(app: ASGIApp, call: InsideCall) -> InsideAnswer:
    """Return the application's answer; cancelling frees its work."""
    headers = {"content-type": "application/json", "x-request-id": call.request_id}
    if call.timeout_s is not None:
        headers[TIMEOUT_HEADER] = f"{min(MAX_TIMEOUT_S, max(MIN_TIMEOUT_S, call.timeout_s)):.3f}"

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {INSIDE: call.tenant}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(told), base_url="http://localhost") as client:
        # The path may hold a model name as the client wrote it in JSON; not every such character is legal in a URL,
        # and the client would follow "..", to another route.
        path = quote(call.path).replace("/.", "/%2E")
        answer = await client.request(call.method, path, content=call.body, headers=headers, timeout=None)
    if len(answer.content) > MAX_ANSWER_BYTES:
        return InsideAnswer(status=413, body=_TOO_LARGE)
    return InsideAnswer(
        status=answer.status_code,
        body=answer.content,
        retry_after_s=_seconds(answer.headers.get("retry-after")),
        is_final=answer.headers.get("x-should-retry") == "false",
    )


async def beating(work: Coroutine[Any, Any, T]) -> AsyncGenerator[T | None, None]:
    """Yield None at once and every `BEAT_S` seconds, as a sign of life, then what the work returns.

    Closing cancels the work.
    """
    task = None
    try:
        # Before the work, which may be what ends this process.
        yield None
        task = asyncio.create_task(work)
        while not (await asyncio.wait({task}, timeout=BEAT_S))[0]:
            yield None
        yield task.result()
    finally:
        if task is None:
            work.close()
        else:
            task.cancel()
            await asyncio.wait({task})


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
