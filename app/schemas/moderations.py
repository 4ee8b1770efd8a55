"""`POST /v1/moderations`, to the letter; the classifier's own hazards stand beside OpenAI's thirteen categories."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from app.schemas.wire import WireRequest, WireResponse, refuse_types


class ModerationPart(WireRequest):
    """One text of a list of parts."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        words = "images are not supported by this server; only text is"
        refuse_types(data, lambda kind: kind == "image_url", words)
        return data


class ModerationRequest(WireRequest):
    """Ask what the safety classifier finds in some texts."""

    input: str | list[str] | list[ModerationPart] = Field(description="A text or several; each gets one result.")
    model: str | None = Field(
        default=None, max_length=256, description="The classifier's name, or one of OpenAI's moderation models."
    )


class ModerationResult(WireResponse):
    """What was found in one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class ModerationResponse(WireResponse):
    """One result for each text, in order."""

    id: str
    model: str
    results: list[ModerationResult]


class ModerationMode(WireRequest):
    """What is done about a text that is flagged."""

    mode: Literal["score", "block"] = Field(description="`score` only tells; `block` lets none of it through.")


class ModerationPolicy(WireRequest):
    """What is done on either side of a chat; what the server itself blocks stays blocked."""

    input: ModerationMode | None = Field(default=None, description="Default: score.")
    output: ModerationMode | None = Field(default=None, description="Default: score.")


class ChatModerationRequest(WireRequest):
    """Ask what the safety classifier finds in a chat."""

    model: str = Field(max_length=256, description="The classifier's name, or one of OpenAI's moderation models.")
    policy: ModerationPolicy | None = None


class ScoredText(ModerationResult):
    """What was found in the input, or in one choice."""

    type: Literal["moderation_result"] = "moderation_result"
    model: str


class ModerationResults(WireResponse):
    """One result for the input; of the output one for each choice that has text."""

    type: Literal["moderation_results"] = "moderation_results"
    model: str
    results: list[ScoredText]


class ModerationError(WireResponse):
    """Why nothing is known."""

    type: Literal["error"] = "error"
    code: Literal["moderation_failed"] = "moderation_failed"
    message: str


class ChatModeration(WireResponse):
    """What was found in a chat."""

    input: ModerationResults | ModerationError
    output: ModerationResults | ModerationError
