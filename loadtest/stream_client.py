"""The streaming client of all load tests: send a request, read the answer and record when each event arrives.

Uses only HTTP and OpenAI's wire format (chat and text completions), and knows nothing else about the server. Runs in
gevent greenlets, like Locust; each connection of a client carries one request at a time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent  # type: ignore[import-untyped, unused-ignore]
from geventhttpclient import HTTPClient  # type: ignore[import-untyped, unused-ignore]
from geventhttpclient.response import HTTPParseError  # type: ignore[import-untyped, unused-ignore]

from loadtest.measure import Exchange
from loadtest.workloads import Ask

CONNECT_TIMEOUT_S = 10.0
DONE = "[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Fields of a chat delta that hold generated text; servers name the text of a thinking model in two ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of `/v1/models`.

    Attributes:
        parent: the base of an adapter.
        context_tokens: context length, if the server lists it (`max_model_len`).
        generates: False if the server lists a task other than `generate`, such as embedding.
    """

    name: str
    parent: str | None
    context_tokens: int | None = None
    generates: bool = True


def headers_for(api_key: str | None = None) -> dict[str, str]:
    """Return the headers of a request, with an API key or that of `ANTIPHON_API_KEY`, if there is one."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if api_key := api_key or os.environ.get("ANTIPHON_API_KEY"):
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


class StreamError(RuntimeError):
    """The answer is incomplete; the message says how it failed."""


class EventLines:
    """Assembles lines of server-sent events into payloads.

    Source: HTML Living Standard, section 9.2.6 (interpreting an event stream). Fields other than `data` are ignored; an
    event without its closing blank line is dropped, as the standard requires.
    """

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: bytes) -> str | None:
        """Process one line, with or without its newline; return the payload of the event that it closes, or None."""
        text = line.rstrip(b"\r\n").decode("utf-8")
        if not text:
            payload = "\n".join(self._data) if self._data else None
            self._data.clear()
            return payload
        name, _, value = text.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


class _Reading:
    """State of reading one answer."""

    def __init__(self, now_ms: Callable[[], float], on_first_text: Callable[[], None]) -> None:
        self._now_ms = now_ms
        self._on_first_text = on_first_text
        self.status = 0
        self.event_ms: list[float] = []
        self.end_ms: float | None = None
        self.usage: Mapping[str, Any] = {}
        self.finish_reason: str | None = None

    def read(self, response: Any) -> None:
        """Read to the end mark.

        Raises:
            StreamError: an error status, an error event, a malformed event, or an end without the end mark.
        """
        self.status = response.status_code
        if self.status != 200:
            raise StreamError(f"HTTP {self.status}: {_message_of(response.read())}")
        lines = EventLines()
        while line := response.readline(b"\n"):
            payload = lines.feed(line)
            if payload == DONE:
                self.end_ms = self._now_ms()
                # Only a connection that has been read to the end can carry the next request.
                response.read()
                return
            if payload is not None:
                self._take(payload)
        raise StreamError("the stream ended without [DONE]")

    def _take(self, payload: str) -> None:
        event = json.loads(payload)
        if not isinstance(event, dict):
            raise StreamError(f"an event that is no JSON object: {payload[:100]}")
        if error := event.get("error"):
            raise StreamError(f"error event: {_error_text(error)}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(field) for field in TEXT_FIELDS):
                self.event_ms.append(self._now_ms())
                if len(self.event_ms) == 1:
                    self._on_first_text()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


class StreamClient:
    """A client of one server, with persistent connections.

    Args:
        host: base URL, such as `http://127.0.0.1:8000`.
        concurrency: maximum number of concurrent requests through this client.
        timeout_s: time without data on a connection after which a request fails.
        api_key: sent with every request; None: that of `ANTIPHON_API_KEY`, if it is set.
    """

    def __init__(
        self, host: str, *, concurrency: int = 1, timeout_s: float = 300.0, api_key: str | None = None
    ) -> None:
        self._http = HTTPClient.from_url(
            host, concurrency=concurrency, connection_timeout=CONNECT_TIMEOUT_S, network_timeout=timeout_s
        )
        self._prefix = urlsplit(host).path.rstrip("/")
        self._headers = headers_for(api_key)

    def ask(self, ask: Ask, *, on_first_text: Callable[[], None] = lambda: None) -> Exchange:
        """Send one request and read its answer to the end; failures are reported in `Exchange.error`.

        `on_first_text` is called once, as soon as the first text arrives.
        """
        body = json.dumps(ask.body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        started_s, started = time.time(), time.perf_counter()

        def now_ms() -> float:
            return (time.perf_counter() - started) * 1000

        reading, error = _Reading(now_ms, on_first_text), None
        try:
            with self._http.post(self._prefix + ask.path, body, self._headers) as response:
                reading.read(response)
        except StreamError as failure:
            error = str(failure)
        except gevent.GreenletExit:
            # A request that is cut short by the end of the test is a failure, too, and must not vanish from the counts.
            error = "unanswered when the test ended"
        except (OSError, HTTPParseError, ValueError, LookupError, TypeError, AttributeError) as failure:
            # The last three: an event of another shape.
            error = f"{type(failure).__name__}: {failure}"
        usage = reading.usage
        details = usage.get("prompt_tokens_details") or {}
        completion_tokens = usage.get("completion_tokens")
        return Exchange(
            workload=ask.workload,
            model=ask.model,
            started_s=started_s,
            status=reading.status,
            error=error,
            event_ms=reading.event_ms,
            end_ms=now_ms() if reading.end_ms is None else reading.end_ms,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            # Without a usage chunk, assume one token per event.
            completion_tokens=len(reading.event_ms) if completion_tokens is None else completion_tokens,
            finish_reason=reading.finish_reason,
        )

    def ask_together(self, asks: Sequence[Ask]) -> list[Exchange]:
        """Send all requests concurrently and wait for all answers."""
        asking = [gevent.spawn(self.ask, ask) for ask in asks]
        gevent.joinall(asking, raise_error=True)
        return [one.value for one in asking]

    def models(self) -> list[ServedModel]:
        """Return the models that `/v1/models` lists.

        Raises:
            StreamError: the server answered with an error, or with something other than a list of models.
            OSError: there is no server.
        """
        try:
            with self._http.get(f"{self._prefix}/v1/models", self._headers) as response:
                content = response.read()
                if response.status_code != 200:
                    raise StreamError(f"GET /v1/models: HTTP {response.status_code}: {_message_of(content)}")
            return [
                ServedModel(
                    name=item["id"],
                    parent=item.get("parent"),
                    context_tokens=item.get("max_model_len"),
                    generates=item.get("task", "generate") == "generate",
                )
                for item in json.loads(content)["data"]
            ]
        except OSError:
            raise  # a certificate that is not trusted is a ValueError, too
        except (HTTPParseError, ValueError, LookupError, TypeError, AttributeError) as failure:
            raise StreamError("GET /v1/models did not answer with a list of models") from failure

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request that is not streamed, and ignore what is answered.

        Raises:
            StreamError: the server answered with an error, or not in HTTP.
            OSError: there is no server.
        """
        try:
            with self._http.post(self._prefix + path, json.dumps(body).encode(), self._headers) as response:
                content = response.read()
        except HTTPParseError as failure:
            raise StreamError(f"POST {path}: {failure}") from failure
        if response.status_code != 200:
            raise StreamError(f"POST {path}: HTTP {response.status_code}: {_message_of(content)}")

    def close(self) -> None:
        """Close the persistent connections."""
        self._http.close()


def _message_of(content: bytes) -> str:
    try:
        return _error_text(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")


def _error_text(error: object) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)
