"""What `GET /requests/{id}` answers: the stages of each answer, and when its tokens came."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class StageInfo(BaseModel):
    """Something that took a while; milliseconds since the request came."""

    name: str
    start_ms: float
    end_ms: float


class AnswerTimeline(BaseModel):
    """One answer of a request."""

    id: str
    model: str
    adapter: str | None = Field(description="Digest of the adapter's content.")
    tenant: str | None
    created: float = Field(description="Unix time at which the request came.")
    outcome: str = Field(description="A finish reason, the type of an error, `cancelled` or `in_progress`.")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_attempts: int = Field(
        description="Calls of engines: more than one where a replica was lost, or of a beam search."
    )
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float | None
    stages: list[StageInfo]
    arrivals: list[tuple[float, int]] = Field(description="When tokens came, in ms, and how many together.")


class RequestTimeline(BaseModel):
    """A request: one answer, or one for each choice."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    answers: list[AnswerTimeline]
