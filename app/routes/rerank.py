"""`POST /v1/score` and `POST /v1/rerank`, also where vLLM has them and where Cohere's clients ask.

The former has vLLM's shape, the latter Jina's and Cohere's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context, RouteContext
from app.routes.embeddings import EmbeddingUsage
from app.schemas.wire import WireRequest, WireResponse
from app.settings import LimitSettings
from app.translation.bounds import check_count
from app.translation.render import ResponseHead
from deployments.pooled import Pair, Reranking, RerankRequest
from engine.errors import RequestError


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


router = APIRouter(route_class=JsonRoute, tags=["rerank"])


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
async def score(body: ScoreRequest, context: Context) -> Response:
    """Score how well documents answer queries."""
    head = context.head("score-", body.model)
    found = await _asked(body, head, _pairs(body, context.limits), context, field="text_2")
    told = ScoreResponse(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        data=[TextScore(index=index, score=score) for index, score in enumerate(found.scores)],
        usage=_usage(found),
    )
    return JsonResponse(told)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
async def rerank(body: RerankBody, context: Context) -> Response:
    """Rank documents by how well they answer a query."""
    head = context.head("rerank-", body.model)
    if not body.documents:
        raise RequestError.about("documents", "must not be empty.")
    check_count(len(body.documents), context.limits.max_documents, "documents", field="documents")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    pairs = tuple(Pair(body.query, text, f"documents[{i}]") for i, text in enumerate(texts))
    found = await _asked(body, head, pairs, context, field="documents")
    ranked = sorted(enumerate(found.scores), key=lambda entry: -entry[1])[: body.top_n or None]
    tells_text = body.return_documents is not False
    told = RerankResponse(
        id=head.response_id,
        model=head.model,
        results=[
            RankedDocument(
                index=index,
                relevance_score=score,
                document=DocumentText(text=texts[index]) if tells_text else None,
            )
            for index, score in ranked
        ],
        usage=_usage(found),
    )
    return JsonResponse(told)


def _pairs(body: ScoreRequest, limits: LimitSettings) -> tuple[Pair, ...]:
    queries = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    documents = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    for field, texts in (("text_1", queries), ("text_2", documents)):
        if not texts:
            raise RequestError.about(field, "must not be empty.")
        check_count(len(texts), limits.max_documents, "texts", field=field)
    if len(queries) not in (1, len(documents)):
        raise RequestError.about(
            "text_1", f"must have 1 text or as many as 'text_2' ({len(documents)}); {len(queries)} were given."
        )
    queries = queries if len(queries) == len(documents) else queries * len(documents)
    fields = ["text_2"] if isinstance(body.text_2, str) else [f"text_2[{i}]" for i in range(len(documents))]
    return tuple(map(Pair, queries, documents, fields))


async def _asked(
    body: CrossEncoderFields, head: ResponseHead, pairs: tuple[Pair, ...], context: RouteContext, *, field: str
) -> Reranking:
    if body.truncate_prompt_tokens == 0:
        raise RequestError.about("truncate_prompt_tokens", "must be -1 or at least 1.")
    request = RerankRequest(
        request_id=context.generation_id(head),
        model=body.model,
        pairs=pairs,
        truncates_to=body.truncate_prompt_tokens,
    )
    most = context.limits.max_prompt_chars
    # A query counts once for each document, because the model reads it with each.
    check_count(request.num_chars, most, "characters, with the query of each pair", field=field)
    return await context.gateway.rerank(context.placed(request))


def _usage(found: Reranking) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=found.num_prompt_tokens, total_tokens=found.num_prompt_tokens)
