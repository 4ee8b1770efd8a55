"""Requests that the server makes to its own application, for a tenant whose key it does not know.

The application runs in the gateway's process as it does for HTTP: the same routes, limits and errors. Who asks is told
in the scope, which no client can write to (`INSIDE`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from deployments.batches.values import InsideAnswer, InsideCall

INSIDE = "inside"
"""Where `scope["state"]` has an `Insider`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Insider:
    """For whom the server asks; the tenant's name is empty where there are none."""

    tenant: str
    priority: int = BATCH_PRIORITY


@dataclass(slots=True)
class _Exchange:
    """One request without a network: its body, and what was answered."""

    body: bytes
    status: int = 500
    headers: Headers = field(default_factory=Headers)
    pieces: list[bytes] = field(default_factory=list)
    is_read: bool = False

    async def receive(self) -> Message:
        if self.is_read:
            # Whoever asks stays until the answer: it never says that it has gone.
            await asyncio.get_running_loop().create_future()
        self.is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = Headers(raw=list(message.get("headers", ())))
        elif message["type"] == "http.response.body":
            self.pieces.append(message.get("body", b""))


async def answer_inside(app: ASGIApp, call: InsideCall) -> InsideAnswer:
    """Return what the application answers; cancelling this frees what it works on."""
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"x-request-id", call.request_id.encode()),
    ]
    if call.timeout_s is not None:
        # The bounds of `X-Request-Timeout`.
        headers.append((b"x-request-timeout", f"{min(86_400.0, max(0.001, call.timeout_s)):.3f}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {INSIDE: Insider(tenant=call.tenant)},
    }
    exchange = _Exchange(call.body)
    await app(scope, exchange.receive, exchange.send)
    if sum(map(len, exchange.pieces)) > MAX_ANSWER_BYTES:
        return InsideAnswer(status=413, body=_TOO_LARGE)
    return InsideAnswer(
        status=exchange.status,
        body=b"".join(exchange.pieces),
        retry_after_s=_seconds(exchange.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
