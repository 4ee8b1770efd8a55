"""`GET /requests/{id}`: what happened to a request, stage by stage, and when its tokens came."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Path, Response
from pydantic import Field

from app.http.errors import ApiError
from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, ReaderContext
from app.schemas.wire import WireResponse
from deployments.timeline import Timeline


class StageInfo(WireResponse):
    """A stage of an answer; times are milliseconds since the request arrived."""

    name: str
    start_ms: float
    end_ms: float


class AnswerTimeline(WireResponse):
    """One answer of a request."""

    id: str
    model: str
    adapter: str | None = Field(description="Digest of the adapter's content.")
    tenant: str | None
    created: float = Field(description="Unix time at which the request arrived.")
    outcome: str = Field(description="A finish reason, an error type, `cancelled` or `in_progress`.")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_attempts: int = Field(
        description="Engine calls: several after a lost replica, for beam search or for several embedding inputs."
    )
    ttft_ms: float | None = Field(description="Until the first token came from the engine.")
    first_text_ms: float | None = Field(description="Until the first text was sent.")
    tpot_ms: float | None
    detokenize_ms: float = Field(description="Time in which the gateway made text of the tokens, in all.")
    total_ms: float | None
    stages: list[StageInfo]
    arrivals: list[tuple[float, int]] = Field(description="When tokens arrived, in ms, and how many at once.")


class RequestTimeline(WireResponse):
    """A request: one answer, or one per choice."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    answers: list[AnswerTimeline]


router = APIRouter(route_class=JsonRoute, tags=["operations"])


@router.get("/requests/{request_id:path}", response_model=RequestTimeline, responses=ERRORS)
async def request_timeline(context: ReaderContext, request_id: str = Path(max_length=128)) -> Response:
    """Return the timeline of a recent request, by the `x-request-id` of its response."""
    found = await context.gateway.timelines(request_id)
    if not found:
        raise ApiError(404, "No recent request has this id.", param="request_id", code="request_not_found")
    return JsonResponse(RequestTimeline(id=request_id, answers=[_answer(timeline) for timeline in found]))


def _answer(timeline: Timeline) -> AnswerTimeline:
    return AnswerTimeline(
        id=timeline.request_id,
        model=timeline.model,
        adapter=timeline.adapter or None,
        tenant=timeline.tenant or None,
        created=timeline.arrived_unix_s,
        outcome=timeline.outcome,
        prompt_tokens=timeline.num_prompt_tokens,
        cached_tokens=timeline.num_cached_tokens,
        completion_tokens=timeline.num_tokens,
        num_attempts=len(timeline.called_s_by_attempt),
        ttft_ms=_ms(timeline.first_token_s),
        first_text_ms=_ms(timeline.first_text_s),
        tpot_ms=_ms(timeline.tpot_s),
        detokenize_ms=round(timeline.detokenize_s * 1000, 3),
        total_ms=_ms(timeline.end_s),
        stages=[
            StageInfo(name=stage.name, start_ms=round(stage.start_s * 1000, 3), end_ms=round(stage.end_s * 1000, 3))
            for stage in timeline.stages
        ],
        arrivals=[(round(arrival.at_s * 1000, 3), arrival.num_tokens) for arrival in timeline.arrivals],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
