"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.http.json_route import JsonResponse, JsonRoute, wants_anthropic_shape
from app.messages_api.answered import model_info, model_page
from app.messages_api.schemas import ModelInfo, ModelPage
from app.routes.context import ERRORS, Context
from app.schemas.models import Model, ModelList
from app.translation import render
from deployments.errors import unknown_model

router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.get("/v1/models", response_model=ModelList | ModelPage, responses=ERRORS)
async def list_models(request: Request, context: Context) -> Response:
    """List every model and adapter, in Anthropic's format if the request has an `anthropic-version` header."""
    models = [render.model(card) for card in context.gateway.models()]
    return JsonResponse(model_page(models) if wants_anthropic_shape(request.scope) else ModelList(data=models))


@router.get("/v1/models/{model:path}", response_model=Model | ModelInfo, responses=ERRORS)
async def retrieve_model(model: str, request: Request, context: Context) -> Response:
    """Return one model, adapter or adapter version, in the format of the list."""
    card = context.gateway.model(model)
    if card is None:
        raise unknown_model(model)
    found = render.model(card)
    return JsonResponse(model_info(found) if wants_anthropic_shape(request.scope) else found)
