"""`POST /classify`, as vLLM has it: the classifier of an adapter, on each input."""

from __future__ import annotations

from typing import Literal

import numpy as np
from fastapi import APIRouter, Response
from pydantic import Field

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.routes.embeddings import EmbeddingUsage, PooledFields
from app.schemas.wire import WireResponse
from deployments.pooled import EmbeddingRequest
from engine.request import Pooling


class ClassifyRequest(PooledFields):
    """Ask an adapter for the probabilities of its labels, for each input."""

    use_activation: bool | None = Field(
        default=None,
        description="Softmax of the scores, or the sigmoid of a single one; defaults to true. `false`: raw scores.",
    )


class Classification(WireResponse):
    """The labels of one input."""

    index: int = Field(description="Position of the input in the request.")
    label: str = Field(description="`LABEL_` and the index of the highest score.")
    probs: list[float] = Field(description="One for each label; scores if `use_activation` is false.")
    num_classes: int


class ClassifyUsage(EmbeddingUsage):
    """Token counts of all inputs together."""

    completion_tokens: int = 0


class ClassifyResponse(WireResponse):
    """The labels of each input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(description="Unix time in seconds.")
    model: str
    data: list[Classification]
    usage: ClassifyUsage


router = APIRouter(route_class=JsonRoute, tags=["classify"])


@router.post("/classify", response_model=ClassifyResponse, responses=ERRORS)
async def classify(body: ClassifyRequest, context: Context) -> Response:
    """Classify each input."""
    head = context.head("classify-", body.model)
    request = EmbeddingRequest(
        request_id=context.generation_id(head),
        model=body.model,
        inputs=body.inputs(context),
        pooling=Pooling.CLASS,
        normalizes=False,
    )
    found = await context.gateway.embed(context.placed(request))
    activates = body.use_activation is not False
    told = ClassifyResponse(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        data=[_told(index, scores, activates=activates) for index, scores in enumerate(found.vectors)],
        usage=ClassifyUsage(prompt_tokens=found.num_prompt_tokens, total_tokens=found.num_prompt_tokens),
    )
    return JsonResponse(told)


def _told(index: int, packed: bytes, *, activates: bool) -> Classification:
    scores = np.frombuffer(packed, "<f4").astype(np.float64)
    # A sigmoid is the softmax of a score and 0. Less the highest, none overflows.
    logits = scores if len(scores) > 1 else np.append(scores, 0.0)
    powers = np.exp(logits - logits.max())
    probs = (powers / powers.sum())[: len(scores)] if activates else scores
    return Classification(index=index, label=f"LABEL_{scores.argmax()}", probs=probs.tolist(), num_classes=len(scores))
