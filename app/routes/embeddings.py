"""`POST /v1/embeddings`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.schemas.embeddings import EmbeddingsRequest, EmbeddingsResponse
from app.translation.embeddings import embedding_request, embeddings_response

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


@router.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=ERRORS)
async def create_embeddings(body: EmbeddingsRequest, context: Context) -> Response:
    """Return one vector per input."""
    head = context.head("embd", body.model)
    request = embedding_request(body, context.limits, request_id=context.generation_id(head))
    found = await context.gateway.embed(
        replace(request, timeout_s=context.timeout_s, trace_parent=context.trace_parent, priority=context.priority)
    )
    return JsonResponse(embeddings_response(body.model, found, body.encoding_format or "float"))
