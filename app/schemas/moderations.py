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
