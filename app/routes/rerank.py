"""`POST /v1/score` and `POST /v1/rerank`, also where vLLM has them and where Cohere's clients ask."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context, RouteContext
from app.schemas.rerank import RerankBody, RerankResponse, ScoreRequest, ScoreResponse
from app.translation.rerank import rerank_request, rerank_response, score_request, score_response
from deployments.pooled import Reranking, RerankRequest

router = APIRouter(route_class=JsonRoute, tags=["rerank"])


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
async def score(body: ScoreRequest, context: Context) -> Response:
    """Score how well documents answer queries."""
    head = context.head("score", body.model)
    request = score_request(body, context.limits, request_id=context.generation_id(head))
    return JsonResponse(score_response(head, await _asked(request, context)))


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank(body: RerankBody, context: Context) -> Response:
    """Rank documents by how well they answer a query."""
    head = context.head("rerank", body.model)
    request = rerank_request(body, context.limits, request_id=context.generation_id(head))
    return JsonResponse(rerank_response(head, await _asked(request, context), body))


async def _asked(request: RerankRequest, context: RouteContext) -> Reranking:
    return await context.gateway.rerank(
        replace(request, timeout_s=context.timeout_s, trace_parent=context.trace_parent)
    )
