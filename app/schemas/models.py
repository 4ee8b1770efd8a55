"""`GET /v1/models`, to the letter, with three extensions: `parent`, `max_model_len` and `task`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import WireResponse


class Model(WireResponse):
    """One servable name."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time in seconds at which the name was declared.")
    owned_by: str = "antiphon"
    parent: str | None = Field(default=None, description="Base model, where this is an adapter.")
    max_model_len: int = Field(description="Context length in tokens.")
    task: str = Field(
        description="`generate`, `embed` of a model that makes vectors only, or `score` of a cross-encoder."
    )


class ModelList(WireResponse):
    """Every servable name, bases before their adapters."""

    object: Literal["list"] = "list"
    data: list[Model]
