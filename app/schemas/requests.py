"""What `GET /requests/{id}` answers: the stages of each answer, and when its tokens came."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class StageInfo(BaseModel):
    """A stage of an answer; times are milliseconds since the request arrived."""

    name: str
    start_ms: float
    end_ms: float


class AnswerTimeline(BaseModel):
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
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float | None
    stages: list[StageInfo]
    arrivals: list[tuple[float, int]] = Field(description="When tokens arrived, in ms, and how many at once.")


class RequestTimeline(BaseModel):
    """A request: one answer, or one per choice."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    answers: list[AnswerTimeline]
