"""`GET /health`, also as `/ping`, `GET /metrics` and `GET /version`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from app.http.errors import without_internals
from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context, OpenContext
from app.schemas.wire import WireResponse


class Health(WireResponse):
    """Whether every required model and part has a replica that makes progress."""

    status: Literal["ready", "unready"]
    models: dict[str, str] = Field(description="By base model: `ready`, or one sentence that says what is wrong.")
    parts: dict[str, str] = Field(
        description="The same for the tokenizer, classifier and cross-encoders that run separately."
    )


class Version(WireResponse):
    """The version of Antiphon that answers."""

    version: str


_version = cache(version)
"""Reads a file."""

router = APIRouter(route_class=JsonRoute, tags=["operations"])


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
@router.get(
    "/health",
    response_model=Health,
    responses={503: {"model": Health, "description": "A required model or part has no working replica."}},
)
async def health(context: OpenContext) -> Response:
    """Report whether every required model and part has a replica that makes progress."""
    report = await context.server.health()
    body = Health(
        status="ready" if report.is_ready else "unready",
        models=_told(report.state_by_model),
        parts=_told(report.state_by_part),
    )
    return JsonResponse(body, status_code=200 if report.is_ready else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 500: ERRORS[500]},
)
async def metrics(context: OpenContext) -> Response:
    """Return metrics in the Prometheus text format."""
    return Response(
        await context.server.metrics(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
    )


@router.get("/version", response_model=Version, responses=ERRORS)
async def read_version(_: Context) -> Response:
    """Return the server's version."""
    return JsonResponse(Version(version=_version("antiphon")))


def _told(states: Mapping[str, str]) -> dict[str, str]:
    return {name: without_internals(state) for name, state in states.items()}
