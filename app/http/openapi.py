"""FastAPI's OpenAPI document, plus the chunks of streams, which no route returns as a value."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
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


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of `app`; built at the first call and cached."""
    if app.openapi_schema is None:
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
        app.openapi_schema = schema
    return app.openapi_schema
