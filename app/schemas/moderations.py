"""`POST /v1/moderations`, to the letter; the classifier's own hazards stand beside OpenAI's thirteen categories."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import WireRequest, WireResponse, checked_type


class ModerationPart(WireRequest):
    """A part of one input."""

    type: Literal["text"]
    text: str

    _only_text = checked_type("image_url".__eq__, "this server does not support images, only text")


class ModerationRequest(WireRequest):
    """Ask the safety classifier to judge texts."""

    input: str | list[str] | list[ModerationPart] = Field(
        description="One or more texts, each of which gets a result, or the parts of one, which get one together."
    )
    model: str | None = Field(
        default=None, max_length=256, description="The classifier's name, or one of OpenAI's moderation models."
    )


class ModerationResult(WireResponse):
    """Findings for one input."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class ModerationResponse(WireResponse):
    """One result per input, in order."""

    id: str
    model: str
    results: list[ModerationResult]


class ModerationMode(WireRequest):
    """What to do with flagged text."""

    mode: Literal["score", "block"] = Field(description="`score` only reports it; `block` lets none of it through.")


class ModerationPolicy(WireRequest):
    """What to do on each side of a chat; what the server itself blocks stays blocked."""

    input: ModerationMode | None = Field(default=None, description="Defaults to `score`.")
    output: ModerationMode | None = Field(default=None, description="Defaults to `score`.")


class ChatModerationRequest(WireRequest):
    """Ask the safety classifier to judge a chat."""

    model: str = Field(max_length=256, description="The classifier's name, or one of OpenAI's moderation models.")
    policy: ModerationPolicy | None = None


class ScoredText(ModerationResult):
    """Findings for the input or for one choice."""

    type: Literal["moderation_result"] = "moderation_result"
    model: str


class ModerationResults(WireResponse):
    """One result for the input; for the output, one per choice that has text."""

    type: Literal["moderation_results"] = "moderation_results"
    model: str
    results: list[ScoredText]


class ModerationError(WireResponse):
    """Why there are no findings."""

    type: Literal["error"] = "error"
    code: Literal["moderation_failed"] = "moderation_failed"
    message: str


class ChatModeration(WireResponse):
    """Findings for a chat."""

    input: ModerationResults | ModerationError
    output: ModerationResults | ModerationError
