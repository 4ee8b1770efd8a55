"""`POST /v1/score` (vLLM's shape) and `POST /v1/rerank` (Jina's and Cohere's): extensions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.schemas.embeddings import EmbeddingUsage
from app.schemas.wire import WireRequest, WireResponse


class CrossEncoderFields(WireRequest):
    """What both have."""

    model: str = Field(min_length=1, max_length=256, description="Public name of a cross-encoder.")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=2**31 - 1,
        description="Cut each pair to so many tokens, -1: to the model's window; null: refuse what does not fit.",
    )
    user: str | None = Field(default=None, max_length=512, description="Accepted, and without effect.")


class ScoreRequest(CrossEncoderFields):
    """Ask how well texts answer texts: one to one, one to several, or as many to as many, place by place."""

    text_1: str | list[str] = Field(description="A query, or several.")
    text_2: str | list[str] = Field(description="A document, or several.")


class TextScore(WireResponse):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float = Field(description="From 0 to 1.")


class ScoreResponse(WireResponse):
    """One score for each pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(description="Unix time in seconds.")
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage


class DocumentText(WireRequest):
    """A document, written as an object."""

    text: str


class RerankBody(CrossEncoderFields):
    """Ask for documents in the order in which they answer a query."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"max_tokens_per_doc": (None,), "max_chunks_per_doc": (None,)}

    query: str
    documents: list[str | DocumentText]
    top_n: int | None = Field(default=None, ge=0, description="Return so many of the best; null or 0: all.")
    return_documents: bool | None = Field(default=None, description="Repeat the documents; default true.")


class RankedDocument(WireResponse):
    """A document and its score."""

    index: int = Field(description="Place of the document in the request.")
    relevance_score: float = Field(description="From 0 to 1.")
    document: DocumentText | None = None


class RerankResponse(WireResponse):
    """Documents, the best first; equal ones in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
