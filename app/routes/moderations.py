"""`POST /v1/moderations`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.errors import ApiError, model_not_found
from app.json_route import JsonResponse, JsonRoute
from app.render import moderation
from app.routes.context import ERRORS, Context, RouteContext
from app.schemas.moderations import ModerationRequest, ModerationResponse
from app.translate import moderation_texts

router = APIRouter(route_class=JsonRoute, tags=["moderations"])

OPENAI_MODELS = ("omni-moderation-", "text-moderation-")
"""Clients have these names built in; they are answered by the classifier that there is."""


@router.post("/v1/moderations", response_model=ModerationResponse, responses=ERRORS)
async def create_moderation(body: ModerationRequest, context: Context) -> Response:
    """Say what the safety classifier finds in some texts."""
    classifier = _classifier(body.model, context)
    texts = moderation_texts(body, context.limits)
    verdicts = await context.gateway.moderate(texts)
    return JsonResponse(moderation(context.head("modr", classifier).response_id, classifier, verdicts))


def _classifier(asked: str | None, context: RouteContext) -> str:
    if context.moderation_model is None:
        raise ApiError(404, "This server has no safety classifier.", param="model", code="model_not_found")
    if asked is not None and asked != context.moderation_model and not asked.startswith(OPENAI_MODELS):
        raise model_not_found(asked)
    return context.moderation_model
