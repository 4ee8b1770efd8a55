"""`POST /v1/embeddings`, to the letter, with two extensions: `pooling` and `normalize`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.schemas.completions import WirePrompt
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse


class EmbeddingsRequest(WireRequest):
    """Ask for a vector of each input: the final hidden states of a base model, or of one with an adapter, pooled."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_special_tokens": (None, True),
        "priority": (None, 0),
        "truncate_prompt_tokens": ASKS_NOTHING,
    }

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    input: WirePrompt = Field(description="Text or token ids; an array of either asks for several vectors.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64` is of float32, little-endian; default `float`."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Keep so many leading numbers of each vector."
    )
    user: str | None = Field(default=None, max_length=512, description="Accepted, and without effect.")
    pooling: Literal["last", "mean"] | None = Field(
        default=None, description="Extension: the last token's hidden state, or the mean of all; null: the model's own."
    )
    normalize: bool | None = Field(default=None, description="Extension: vectors have unit length; default true.")


class EmbeddingVector(WireResponse):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Place of the input in the request.")
    embedding: list[float] | str


class EmbeddingUsage(WireResponse):
    """Tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(WireResponse):
    """One vector for each input, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage
