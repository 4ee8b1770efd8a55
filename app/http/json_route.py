"""JSON in and out: a route that reads only strict JSON, and a response that writes JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Scope

from app.http.body_threads import BodyThreads
from app.http.errors import ApiError
from app.http.field_errors import TOO_DEEP
from app.messages_api.answered import error_body
from deployments.timeline import Reception

MAX_INLINE_BYTES = 64 << 10
"""Longer bodies are read on another thread: 4 MB take up to some seconds, and the event loop serves everyone else."""
IS_LARGE = "has_large_body"
"""The attribute of a request's state that says whether its body is such a one."""
RECEPTION = "reception"
"""The attribute of a request's state that holds its `deployments.timeline.Reception`."""
TENANT = "tenant"
"""The attribute of a request's state that names the tenant whose key it brings; absent if it is nobody's."""
Validate = Callable[[Any], tuple[Any, list[dict[str, Any]]]]
"""Returns the model that parsed JSON describes, and what is wrong with it."""


class JsonResponse(Response):
    """A JSON response from one of our schemas or from plain values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return a schema or plain values as bytes."""
        return content.model_dump_json().encode() if isinstance(content, BaseModel) else orjson.dumps(content)


async def respond(make: Callable[[], object], *, is_large: bool) -> JsonResponse:
    """Return a response; make and render a large one on another thread, as the event loop serves everyone else."""

    def render() -> JsonResponse:
        return JsonResponse(make())

    return await asyncio.to_thread(render) if is_large else render()


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    """Return the response for an error, in the format of the API that the client used."""
    body: dict[str, Any] = error.body()
    if wants_anthropic_shape(scope):
        body = error_body(error, scope["state"]["request_id"])
    return JsonResponse(body, status_code=error.status, headers=error.headers)


def route_path(scope: Scope) -> str:
    """Return the path as the routes have it: without the `route_prefix`, which Serve leaves in it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def reception_of(scope: Scope) -> Reception:
    """Return what is recorded of a request from its arrival on."""
    reception: Reception = scope["state"][RECEPTION]
    return reception


def wants_anthropic_shape(scope: Scope) -> bool:
    """Return whether the client is Anthropic's; on routes that both APIs have, a header identifies it."""
    path = f"{route_path(scope)}/"
    return path.startswith("/v1/messages/") or (
        path.startswith("/v1/models/") and "anthropic-version" in Headers(scope=scope)
    )


class JsonRequest(Request):
    """Parses with orjson: refuses NaN, lone surrogates, invalid UTF-8, numbers beyond a double, and depth over 1024."""

    async def parse(self, validate: Validate) -> None:
        """Parse the body for `json`; if it is large, parse and validate it on another thread, where tenants take turns.

        Raises:
            ApiError: 400 for a key that occurs twice in one object, and for depth that no parser can follow.
            RequestValidationError: a large body is not valid.
        """
        body = await self.body()
        is_large = len(body) > MAX_INLINE_BYTES
        setattr(self.state, IS_LARGE, is_large)
        if not is_large:
            self._content = _parsed(body)
            return
        threads: BodyThreads = self.app.state.body_threads
        self._content = await threads.run(getattr(self.state, TENANT, ""), partial(_validated, body, validate))

    async def json(self) -> Any:
        """Return the parsed body, or the model that a large one was validated to, which FastAPI takes as it is.

        Raises:
            orjson.JSONDecodeError: it is not JSON.
        """
        if isinstance(self._content, orjson.JSONDecodeError):
            raise self._content
        return self._content


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()
        field = self.body_field

        async def handle_json(request: Request) -> Response:
            asked = JsonRequest(request.scope, request.receive)
            if field is not None:
                _check_content(request)
                with reception_of(request.scope).stage("parse"):
                    await asked.parse(partial(field.validate, loc=("body",)))
            return await handle(asked)

        return handle_json


def _validated(body: bytes, validate: Validate) -> Any:
    """Return the model that a body describes, or the error of one that is not JSON."""
    parsed = _parsed(body)
    if isinstance(parsed, orjson.JSONDecodeError):
        return parsed
    value, errors = validate(parsed)
    if errors:
        raise RequestValidationError(errors, body=parsed)
    return value


def _parsed(body: bytes) -> Any:
    """Return what a body holds, or the error of one that is not JSON, which FastAPI expects later."""
    _check_keys(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return error


def _check_keys(body: bytes) -> None:
    """Refuse a key that occurs twice in one object, because two parsers may pick different values."""
    try:
        json.loads(body, object_pairs_hook=_without_doubles)
    except ValueError:
        # Refused when the body is parsed, with the place.
        return
    except RecursionError:
        raise ApiError(400, f"The request body is not valid JSON: {TOO_DEEP}.", code="invalid_json") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) == len({key for key, _ in pairs}):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            name = key[:64].encode("utf-8", "replace").decode()
            raise ApiError(400, f"The key '{name}' stands twice in one object.", param=name, code="duplicate_key")
        seen.add(key)


def _check_content(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        error = unsupported_media("A body with a 'content-encoding' is not read; send it as it is.", "content-encoding")
        error.headers["accept-encoding"] = "identity"
        raise error
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise unsupported_media("The content type must be 'application/json'.", "content-type")


def unsupported_media(message: str, header: str) -> ApiError:
    """Return the error for a body of a kind that is not read; the header tells of it."""
    return ApiError(415, message, param=header, code="unsupported_media_type")
