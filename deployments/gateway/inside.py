"""Requests that the server makes to its own application, for a tenant whose key it does not know.

The application runs in the gateway's process as it does for HTTP: the same routes, limits and errors. Who asks is told
in the scope, which no client can write to (`INSIDE`).
"""

from __future__ import annotations

import json
from urllib.parse import quote

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.batches.values import InsideAnswer, InsideCall

INSIDE = "inside"
"""Where `scope["state"]` has the name of the tenant, empty where there are none."""
BATCH_PRIORITY = 2**33
"""Added to that of each request: more than a client can take off, so that theirs is below all others."""

MAX_ANSWER_BYTES = 4_000_000
"""What Serve carries back in one message."""
_TOO_LARGE = json.dumps(
    {
        "error": {
            "message": f"The answer is over {MAX_ANSWER_BYTES} bytes, which a line of a batch may not be.",
            "type": "invalid_request_error",
            "param": None,
            "code": "answer_too_large",
        }
    }
).encode()


async def answer_inside(app: ASGIApp, call: InsideCall) -> InsideAnswer:
    """Return what the application answers; cancelling this frees what it works on."""
    headers = {"content-type": "application/json", "x-request-id": call.request_id}
    if call.timeout_s is not None:
        # The bounds of `X-Request-Timeout`.
        headers["x-request-timeout"] = f"{min(86_400.0, max(0.001, call.timeout_s)):.3f}"

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {INSIDE: call.tenant}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(told), base_url="http://localhost") as client:
        # A model's name stands in it as a client wrote it, and not all that JSON holds may stand in a URL.
        path = quote(call.path)
        answer = await client.request(call.method, path, content=call.body, headers=headers, timeout=None)
    if len(answer.content) > MAX_ANSWER_BYTES:
        return InsideAnswer(status=413, body=_TOO_LARGE)
    return InsideAnswer(
        status=answer.status_code,
        body=answer.content,
        retry_after_s=_seconds(answer.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
