"""`POST /v1/embeddings`, to the letter, with two extensions: `pooling` and `normalize`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.schemas.completions import WirePrompt
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse


class EmbeddingsRequest(WireRequest):
    """Ask for one vector per input: the pooled final hidden states of a base model, with or without an adapter."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_special_tokens": (None, True),
        "priority": (None, 0),
        "truncate_prompt_tokens": ASKS_NOTHING,
    }

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    input: WirePrompt = Field(description="Text or token ids, or an array of either for several vectors.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64` encodes little-endian float32; defaults to `float`."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Keep this many leading numbers of each vector."
    )
    user: str | None = Field(default=None, max_length=512, description="Accepted, no effect.")
    pooling: Literal["last", "mean"] | None = Field(
        default=None, description="Extension: the last token's hidden state or the mean of all; null: the model's own."
    )
    normalize: bool | None = Field(default=None, description="Extension: vectors have unit length; defaults to true.")


class EmbeddingVector(WireResponse):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Position of the input in the request.")
    embedding: list[float] | str


class EmbeddingUsage(WireResponse):
    """Token counts of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(WireResponse):
    """One vector per input, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage
