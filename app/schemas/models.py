"""`GET /v1/models`, to the letter, with three extensions: `parent`, `max_model_len` and `task`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import WireResponse


class Model(WireResponse):
    """A name that can be requested."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time in seconds at which the name was declared.")
    owned_by: str = "antiphon"
    parent: str | None = Field(default=None, description="Base model, if this is an adapter.")
    max_model_len: int = Field(description="Context length in tokens.")
    task: str = Field(description="`generate`, `embed` for embedding-only models, or `score` for cross-encoders.")


class ModelList(WireResponse):
    """Every name that can be requested; base models before their adapters."""

    object: Literal["list"] = "list"
    data: list[Model]
