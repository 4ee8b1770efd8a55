"""`GET /v1/models` and `GET /v1/models/{model}`, to the letter.

There are three extensions: `parent`, `max_model_len` and `task`.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from app.http.json_route import JsonResponse, JsonRoute, respond, wants_anthropic_shape
from app.messages_api.answered import model_info, model_page
from app.messages_api.schemas import ModelInfo, ModelPage
from app.routes.context import ERRORS, Context
from app.schemas.wire import WireResponse
from deployments.errors import unknown_model
from deployments.generation import ModelCard


class Model(WireResponse):
    """A name that can be requested."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time in seconds at which the name was declared.")
    owned_by: str = "antiphon"
    parent: str | None = Field(default=None, description="Base model, if this is an adapter.")
    max_model_len: int = Field(description="Context length in tokens.")
    task: str = Field(description="`generate`, `embed` for embedding-only models, or `score` for cross-encoders.")


class ModelList(WireResponse):
    """Every name that can be requested; base models before their adapters."""

    object: Literal["list"] = "list"
    data: list[Model]


router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.get("/v1/models", response_model=ModelList | ModelPage, responses=ERRORS)
async def list_models(request: Request, context: Context) -> Response:
    """List every model and adapter, in Anthropic's format if the request has an `anthropic-version` header."""

    def make() -> ModelList | ModelPage:
        cards = context.gateway.models()
        if wants_anthropic_shape(request.scope):
            return model_page(cards)
        return ModelList(data=[_model(card) for card in cards])

    # There may be thousands of adapters.
    return await respond(make, is_large=True)


@router.get("/v1/models/{model:path}", response_model=Model | ModelInfo, responses=ERRORS)
async def retrieve_model(model: str, request: Request, context: Context) -> Response:
    """Return one model, adapter or adapter version, in the format of the list."""
    card = context.gateway.model(model)
    if card is None:
        raise unknown_model(model)
    return JsonResponse(model_info(card) if wants_anthropic_shape(request.scope) else _model(card))


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.name, created=card.created_s, parent=card.parent, max_model_len=card.max_model_len, task=card.task
    )
