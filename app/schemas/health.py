"""`GET /health`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import WireResponse


class Health(WireResponse):
    """Whether everything that an answer needs has a replica that makes progress."""

    status: Literal["ready", "unready"]
    models: dict[str, str] = Field(description="For each base model `ready`, or one sentence on what is wrong.")
    parts: dict[str, str] = Field(
        description="Likewise of the tokenizer, classifier and cross-encoders that run by themselves."
    )
