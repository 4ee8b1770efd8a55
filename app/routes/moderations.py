"""`POST /v1/moderations`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.schemas.moderations import ModerationPart, ModerationRequest, ModerationResponse
from app.translation.bounds import check_chars, check_count
from app.translation.moderation import classifier_name, result
from deployments.answer_events import worst
from engine.errors import RequestError

router = APIRouter(route_class=JsonRoute, tags=["moderations"])


@router.post("/v1/moderations", response_model=ModerationResponse, responses=ERRORS)
async def create_moderation(body: ModerationRequest, context: Context) -> Response:
    """Return the safety classifier's findings for texts."""
    classifier = classifier_name(body.model, context.moderation_model)
    items = [body.input] if isinstance(body.input, str) else body.input
    texts = [item if isinstance(item, str) else item.text for item in items]
    if not texts:
        raise RequestError.about("input", "must not be empty.")
    check_count(len(texts), context.limits.max_prompts, "texts", field="input")
    check_chars(sum(map(len, texts)), context.limits, field="input")
    verdicts = await context.gateway.moderate(texts)
    if isinstance(items[0], ModerationPart) and (merged := worst(verdicts)) is not None:
        # Parts are one input together.
        verdicts = (merged,)
    head = context.head("modr-", classifier)
    return JsonResponse(ModerationResponse(id=head.response_id, model=classifier, results=list(map(result, verdicts))))
