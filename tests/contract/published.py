"""Whether an answer is what OpenAI's published schemas say, and has no field that they do not name.

`openai_schemas.json` is as it was published. What is wrong in it, and what we add on purpose, is here, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import httpx
import jsonschema

SCHEMAS = Path(__file__).with_name("openai_schemas.json")

_RESULT = "CreateModerationResponse/properties/results/items/properties/"
_CHOICE = "CreateCompletionResponse/properties/choices/items/properties/"
_SCORES = f"{_CHOICE}logprobs/anyOf/0/properties/"
_RESPONSE = "Response/allOf/2/properties"
_STEPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_NULL = {"nullable": True}

EXCEPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (
        ("Model/properties",),
        {"parent": True, "max_model_len": True, "task": {"enum": ["generate", "score"]}},
        "ours: an adapter's base, the context length, what it may be asked for",
    ),
    (
        ("ChatCompletionResponseMessage/properties", "ChatCompletionStreamResponseDelta/properties"),
        {"reasoning_content": {"type": "string"}},
        "ours: thoughts, as other servers of open models tell them",
    ),
    (
        ("CreateChatCompletionResponse/properties", "CreateChatCompletionStreamResponse/properties", _CHOICE[:-1]),
        {"prompt_logprobs": {"type": "array"}, "prompt_token_ids": {"type": "array"}},
        "ours and vLLM's: where they are asked for",
    ),
    (
        (
            "CreateChatCompletionResponse/properties/choices/items/properties",
            "CreateChatCompletionStreamResponse/properties/choices/items/properties",
            _CHOICE[:-1],
        ),
        {"stop_reason": {"type": ["string", "integer"]}, "token_ids": {"type": "array"}},
        "vLLM's: the request's own stop string or token, where one ended the answer, and what was asked for",
    ),
    (
        (f"{_RESULT}categories", f"{_RESULT}category_scores", f"{_RESULT}category_applied_input_types"),
        {"additionalProperties": True},
        "ours: a classifier's hazards that OpenAI has no category for",
    ),
    (
        ("ResponseLogProb/properties", "ResponseLogProb/properties/top_logprobs/items/properties"),
        {"bytes": {"type": "array"}},
        "ours: as in whole responses",
    ),
    (("CreateCompletionResponse/properties",), {"obfuscation": {"type": "string"}}, "streams have it on request"),
    (("CreateCompletionResponse/properties/usage", f"{_CHOICE}finish_reason"), _NULL, "so in chunks of streams"),
    ((f"{_SCORES}token_logprobs/items", f"{_SCORES}top_logprobs/items"), _NULL, "the first of an echoed prompt"),
    (("Embedding/properties/embedding",), {"type": ["array", "string"]}, "base64 may be asked for"),
    (
        (
            "ModelResponseProperties/properties/user",
            f"{_RESPONSE}/usage",
            *(f"Batch/properties/{done}_at" for done in _STEPS),
            *(f"Batch/properties/{name}" for name in ("model", "errors", "output_file_id", "error_file_id")),
        ),
        _NULL,
        "so in OpenAI's own examples, or in others of their kind",
    ),
    (
        tuple(f"List{kind}Response/properties/{end}_id" for kind in ("Files", "Batches") for end in ("first", "last")),
        _NULL,
        "an empty page has none",
    ),
    ((_RESPONSE,), {"store": {"type": "boolean"}}, "so in OpenAI's own examples"),
)
"""Places in the schemas, what is added there, and why: a field of ours, or something that the schemas lack."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "POST /v1/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "POST /v1/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "POST /v1/responses": ("Response", "ResponseStreamEvent"),
    "GET /v1/responses/[^/]+": ("Response",),
    "POST /v1/embeddings": ("CreateEmbeddingResponse",),
    "POST /v1/moderations": ("CreateModerationResponse",),
    "GET /v1/models": ("ListModelsResponse",),
    "GET /v1/models/.+": ("Model",),
    "GET /v1/files": ("ListFilesResponse",),
    "POST /v1/files": ("OpenAIFile",),
    "GET /v1/files/[^/]+": ("OpenAIFile",),
    "DELETE /v1/files/[^/]+": ("DeleteFileResponse",),
    "GET /v1/batches": ("ListBatchesResponse",),
    "POST /v1/batches": ("Batch",),
    "GET /v1/batches/[^/]+": ("Batch",),
    "POST /v1/batches/[^/]+/cancel": ("Batch",),
}
"""Request -> the schema of its answer, and that of the events of its stream."""


def check_answer(response: httpx.Response) -> None:
    """Do nothing where an answer that was read is as published, or OpenAI's API was not asked.

    Raises:
        AssertionError: it is not; names the place.
    """
    asked = f"{response.request.method} {response.request.url.path}"
    names = next((names for route, names in ANSWERS.items() if re.fullmatch(route, asked)), None)
    if names is None or "anthropic-version" in response.request.headers:
        return
    if response.status_code >= 400:
        check("ErrorResponse", response.json())
    elif response.headers["content-type"].startswith("text/event-stream"):
        for event in events(response.text):
            check("ErrorResponse" if event.keys() == {"error"} else _event_name(names[1], event), event)
    else:
        check(names[0], response.json())


async def _check_when_read(response: httpx.Response) -> None:
    await response.aread()
    check_answer(response)


CHECKED = {"response": [_check_when_read]}
"""Hooks of a client whose answers are all checked."""


def events(stream: str) -> Iterator[dict[str, Any]]:
    """Yield what the data lines of a stream say, but for its end mark."""
    for data in re.findall("^data: (.*)$", stream, re.MULTILINE):
        if data != "[DONE]":
            yield json.loads(data)


def check(name: str, value: Any) -> None:
    """Do nothing where a value is what the schema of a name says.

    Raises:
        AssertionError: it is not; names the place.
    """
    # What is wrong inside a field makes the field unnamed too: that is told only where nothing else is wrong.
    errors = sorted(_validator(name).iter_errors(value), key=lambda error: error.validator == "unevaluatedProperties")
    error = jsonschema.exceptions.best_match(errors[:1])
    assert error is None, f"{name}, {error.json_path}: {error.message[:400]}"


def _event_name(name: str, event: Mapping[str, Any]) -> str:
    """Return the schema of an event that says its type, else the one for events of any kind."""
    schemas = _components()["components"]["schemas"]
    refs = (each["$ref"].rpartition("/")[2] for each in schemas[name].get("anyOf", ()))
    return next((ref for ref in refs if event["type"] in schemas[ref]["properties"]["type"]["enum"]), name)


@lru_cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_closed({"$ref": f"#/components/schemas/{name}"}) | _components())


def place_in(schemas: dict[str, Any], place: str) -> Any:
    """Return the schema that stands at a place, as `Name/properties/field`."""
    return reduce(lambda inner, key: inner[int(key) if key.isdigit() else key], place.split("/"), schemas)


@lru_cache
def _components() -> dict[str, Any]:
    schemas = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    del schemas["$comment"]
    for places, change, _ in EXCEPTIONS:
        for place in places:
            place_in(schemas, place).update(change)
    return {"components": {"schemas": {name: _inside(schema) for name, schema in schemas.items()}}}


def _closed(schema: Any) -> Any:
    """Return a schema of one value such that an object may have only the fields that are named for it."""
    if not schema or not isinstance(schema, dict):
        return schema  # Anything.
    closed = _inside(schema) | {"unevaluatedProperties": False}
    # A word of OpenAPI 3.0 that its version 3.1 and JSON Schema do not know.
    return {"anyOf": [closed, {"type": "null"}]} if schema.get("nullable") else closed


def _inside(schema: Any) -> Any:
    """Return a schema whose parts are closed; those that look at the same value are not parts, but belong to it."""
    closed = dict(schema)
    for key, value in schema.items():
        if key in ("allOf", "anyOf", "oneOf"):
            closed[key] = [_inside(each) for each in value]
        elif key == "properties":
            closed[key] = {name: _closed(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties"):
            closed[key] = _closed(value)
    return closed
