"""Translate a validated embedding request to `EmbeddingRequest`, and vectors to the response. Pure functions."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Literal

from app.schemas.embeddings import EmbeddingsRequest, EmbeddingsResponse, EmbeddingUsage, EmbeddingVector
from app.settings import LimitSettings
from app.translation.bounds import check_count
from app.translation.translate import plain_prompts
from deployments.generation import TextPrompt
from deployments.pooled import EmbeddingRequest, Embeddings
from engine.request import Pooling

Encoding = Literal["float", "base64"]


def embedding_request(body: EmbeddingsRequest, limits: LimitSettings, *, request_id: str) -> EmbeddingRequest:
    """Return the request to the gateway.

    Raises:
        RequestError: the request exceeds a limit.
    """
    inputs = plain_prompts(body.input, limits.max_embedding_inputs, "inputs", field="input")
    num_chars = sum(len(i.text) if isinstance(i, TextPrompt) else len(i.token_ids) for i in inputs)
    check_count(num_chars, limits.max_prompt_chars, "characters or token ids", field="input")
    return EmbeddingRequest(
        request_id=request_id,
        model=body.model,
        inputs=inputs,
        pooling=None if body.pooling is None else Pooling(body.pooling),
        dimensions=body.dimensions,
        normalizes=body.normalize is not False,
    )


def embeddings_response(model: str, found: Embeddings, encoding: Encoding) -> EmbeddingsResponse:
    """Return the vectors in the encoding that the client requested."""
    return EmbeddingsResponse(
        data=[EmbeddingVector(index=i, embedding=_written(v, encoding)) for i, v in enumerate(found.vectors)],
        model=model,
        usage=EmbeddingUsage(prompt_tokens=found.num_prompt_tokens, total_tokens=found.num_prompt_tokens),
    )


def _written(vector: bytes, encoding: Encoding) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector).decode("ascii")
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
