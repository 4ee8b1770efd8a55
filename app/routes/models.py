"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.schemas.models import Model, ModelList
from app.translation import render
from deployments.errors import unknown_model

router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def list_models(context: Context) -> Response:
    """List every base model and adapter."""
    return JsonResponse(ModelList(data=[render.model(card) for card in context.gateway.models()]))


@router.get("/v1/models/{model:path}", response_model=Model, responses=ERRORS)
async def retrieve_model(model: str, context: Context) -> Response:
    """Describe one base model, adapter or version of an adapter."""
    card = context.gateway.model(model)
    if card is None:
        raise unknown_model(model)
    return JsonResponse(render.model(card))
