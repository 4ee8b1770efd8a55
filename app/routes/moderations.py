"""`POST /v1/moderations`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.schemas.moderations import ModerationRequest, ModerationResponse
from app.translation.moderation import classifier_name, moderation, verdicts_by_input
from app.translation.translate import moderation_texts

router = APIRouter(route_class=JsonRoute, tags=["moderations"])


@router.post("/v1/moderations", response_model=ModerationResponse, responses=ERRORS)
async def create_moderation(body: ModerationRequest, context: Context) -> Response:
    """Return the safety classifier's findings for texts."""
    classifier = classifier_name(body.model, context.moderation_model)
    texts = moderation_texts(body, context.limits)
    verdicts = verdicts_by_input(body, await context.gateway.moderate(texts))
    return JsonResponse(moderation(context.head("modr", classifier).response_id, classifier, verdicts))
