"""`GET /health`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import WireResponse


class Health(WireResponse):
    """Whether every required model and part has a replica that makes progress."""

    status: Literal["ready", "unready"]
    models: dict[str, str] = Field(description="By base model: `ready`, or one sentence that says what is wrong.")
    parts: dict[str, str] = Field(
        description="The same for the tokenizer, classifier and cross-encoders that run separately."
    )
