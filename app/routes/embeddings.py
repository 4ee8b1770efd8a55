"""`POST /v1/embeddings`, to the letter, with two extensions: `pooling` and `normalize`."""

from __future__ import annotations

import base64
from typing import ClassVar, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Response
from pydantic import Field

from app.http.json_route import JsonRoute, respond
from app.routes.context import ERRORS, Context, RouteContext
from app.schemas.completions import WirePrompt
from app.schemas.wire import ASKS_NOTHING, ModelName, WireRequest, WireResponse
from app.translation.prompts import check_size, plain_prompts
from deployments.generation import TextPrompt, TokenPrompt
from deployments.pooled import EmbeddingRequest
from engine.request import Pooling


class PooledFields(WireRequest):
    """Fields of every request that has something computed of each of its inputs."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_special_tokens": (None, True),
        "priority": (None, 0),
        "truncate_prompt_tokens": ASKS_NOTHING,
    }

    model: ModelName
    input: WirePrompt = Field(description="Text or token ids, or an array of either for several inputs.")
    user: str | None = Field(default=None, max_length=512, description="Accepted, no effect.")

    def inputs(self, context: RouteContext) -> tuple[TextPrompt | TokenPrompt, ...]:
        """Return the inputs.

        Raises:
            RequestError: they are too many or too long.
        """
        inputs = plain_prompts(self.input, context.limits.max_embedding_inputs, "inputs", field="input")
        check_size(inputs, context.limits, field="input")
        return inputs


class EmbeddingsRequest(PooledFields):
    """Ask for one vector per input: the pooled final hidden states of a base model, with or without an adapter."""

    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64` encodes little-endian float32; defaults to `float`."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Keep this many leading numbers of each vector."
    )
    pooling: Literal["last", "mean"] | None = Field(
        default=None, description="Extension: the last token's hidden state or the mean of all; null: the model's own."
    )
    normalize: bool | None = Field(default=None, description="Extension: vectors have unit length; defaults to true.")


class EmbeddingVector(WireResponse):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Position of the input in the request.")
    embedding: list[float] | str


class EmbeddingUsage(WireResponse):
    """Token counts of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(WireResponse):
    """One vector per input, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


@router.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=ERRORS)
async def create_embeddings(body: EmbeddingsRequest, context: Context) -> Response:
    """Return one vector per input."""
    request = EmbeddingRequest(
        request_id=context.generation_id(context.head("embd-", body.model)),
        model=body.model,
        inputs=body.inputs(context),
        pooling=None if body.pooling is None else Pooling(body.pooling),
        dimensions=body.dimensions,
        normalizes=body.normalize is not False,
    )
    found = await context.gateway.embed(context.placed(request))

    def make() -> dict[str, object]:
        data = [
            {"object": "embedding", "index": index, "embedding": _told(vector, body.encoding_format)}
            for index, vector in enumerate(found.vectors)
        ]
        usage = EmbeddingUsage(prompt_tokens=found.num_prompt_tokens, total_tokens=found.num_prompt_tokens)
        return {"object": "list", "data": data, "model": body.model, "usage": usage.model_dump()}

    return await respond(make, is_large=len(found.vectors) > 1)


def _told(vector: bytes, encoding: Literal["float", "base64"] | None) -> orjson.Fragment | str:
    """Return a vector as the answer has it.

    A list is written here: many vectors written by one call would hold up all threads for up to a second.
    """
    if encoding == "base64":
        return base64.b64encode(vector).decode("ascii")
    numbers = np.frombuffer(vector, "<f4").astype(np.float64)
    return orjson.Fragment(orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY))
