"""FastAPI's OpenAPI document, plus the chunks of streams, which no route returns as a value."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from app.schemas.chat import ChatCompletionChunk
from app.schemas.completions import Completion

_REFERENCE = "#/components/schemas/{model}"
_CHUNK_BY_PATH = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": Completion}

_EVENTS_BY_PATH = {
    "/v1/responses": "Events of OpenAI's types `response.*`, each with its `sequence_number`.",
    "/v1/messages": "Events of Anthropic's types `message_*` and `content_block_*`.",
}


def serve_document(app: FastAPI) -> None:
    """Add the route of the document. Nobody needs a key for it, so it is made once, and not on the event loop."""
    made_by_root: dict[str, asyncio.Future[bytes]] = {}

    async def answer(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        if root_path not in made_by_root:
            made_by_root[root_path] = asyncio.ensure_future(asyncio.to_thread(_document, app, root_path))
        # Others may wait for it, too.
        return Response(await asyncio.shield(made_by_root[root_path]), media_type="application/json")

    app.add_route("/openapi.json", answer, include_in_schema=False)


def _document(app: FastAPI, root_path: str) -> bytes:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, chunks = models_json_schema(
        [(ChatCompletionChunk, "serialization"), (Completion, "serialization")], ref_template=_REFERENCE
    )
    schema["components"]["schemas"] = chunks["$defs"] | schema["components"]["schemas"]
    for path, model in _CHUNK_BY_PATH.items():
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
    for path, events in _EVENTS_BY_PATH.items():
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": {"type": "string", "description": events}}
    if root_path:
        schema["servers"] = [{"url": root_path}]
    return orjson.dumps(schema)
