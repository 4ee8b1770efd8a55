"""`POST /v1/score` (vLLM's shape) and `POST /v1/rerank` (Jina's and Cohere's): extensions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.schemas.embeddings import EmbeddingUsage
from app.schemas.wire import WireRequest, WireResponse


class CrossEncoderFields(WireRequest):
    """Fields that both requests share."""

    model: str = Field(min_length=1, max_length=256, description="Public name of a cross-encoder.")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=2**31 - 1,
        description="Truncate each pair to this many tokens; -1: to the model's window; null: refuse longer pairs.",
    )
    user: str | None = Field(default=None, max_length=512, description="Accepted, no effect.")


class ScoreRequest(CrossEncoderFields):
    """Ask how well documents answer queries: one to one, one to many, or lists of equal length, pairwise."""

    text_1: str | list[str] = Field(description="One or more queries.")
    text_2: str | list[str] = Field(description="One or more documents.")


class TextScore(WireResponse):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float = Field(description="From 0 to 1.")


class ScoreResponse(WireResponse):
    """One score per pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(description="Unix time in seconds.")
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage


class DocumentText(WireRequest):
    """A document as an object."""

    text: str


class RerankBody(CrossEncoderFields):
    """Ask for documents ranked by how well they answer a query."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"max_tokens_per_doc": (None,), "max_chunks_per_doc": (None,)}

    query: str
    documents: list[str | DocumentText]
    top_n: int | None = Field(default=None, ge=0, description="Return only this many of the best; null or 0: all.")
    return_documents: bool | None = Field(default=None, description="Include the documents; defaults to true.")


class RankedDocument(WireResponse):
    """A document and its score."""

    index: int = Field(description="Position of the document in the request.")
    relevance_score: float = Field(description="From 0 to 1.")
    document: DocumentText | None = None


class RerankResponse(WireResponse):
    """Documents, best first; ties are in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
