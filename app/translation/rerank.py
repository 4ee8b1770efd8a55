"""Translate validated score and rerank requests to `RerankRequest`, and scores to responses. Pure functions."""

from __future__ import annotations

from app.schemas.embeddings import EmbeddingUsage
from app.schemas.rerank import (
    DocumentText,
    RankedDocument,
    RerankBody,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    TextScore,
)
from app.settings import LimitSettings
from app.translation.bounds import check_count
from app.translation.render import ResponseHead
from deployments.pooled import Pair, Reranking, RerankRequest
from engine.errors import RequestError


def score_request(body: ScoreRequest, limits: LimitSettings, *, request_id: str) -> RerankRequest:
    """Return the request to the gateway.

    Raises:
        RequestError: the texts cannot be paired, or exceed a limit.
    """
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
    pairs = tuple(map(Pair, queries, documents, fields))
    return _request(body.model, pairs, body.truncate_prompt_tokens, limits, request_id, "text_2")


def rerank_request(body: RerankBody, limits: LimitSettings, *, request_id: str) -> RerankRequest:
    """Return the request to the gateway.

    Raises:
        RequestError: there are no documents, or the request exceeds a limit.
    """
    if not body.documents:
        raise RequestError.about("documents", "must not be empty.")
    check_count(len(body.documents), limits.max_documents, "documents", field="documents")
    pairs = tuple(Pair(body.query, _text(document), f"documents[{i}]") for i, document in enumerate(body.documents))
    return _request(body.model, pairs, body.truncate_prompt_tokens, limits, request_id, "documents")


def score_response(head: ResponseHead, found: Reranking) -> ScoreResponse:
    """Return the scores in the order of the pairs."""
    return ScoreResponse(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        data=[TextScore(index=index, score=score) for index, score in enumerate(found.scores)],
        usage=_usage(found),
    )


def rerank_response(head: ResponseHead, found: Reranking, body: RerankBody) -> RerankResponse:
    """Return the best documents first."""
    ranked = sorted(enumerate(found.scores), key=lambda entry: -entry[1])[: body.top_n or None]
    tells_text = body.return_documents is not False
    return RerankResponse(
        id=head.response_id,
        model=head.model,
        results=[
            RankedDocument(
                index=index,
                relevance_score=score,
                document=DocumentText(text=_text(body.documents[index])) if tells_text else None,
            )
            for index, score in ranked
        ],
        usage=_usage(found),
    )


def _request(
    model: str,
    pairs: tuple[Pair, ...],
    truncates_to: int | None,
    limits: LimitSettings,
    request_id: str,
    field: str,
) -> RerankRequest:
    if truncates_to == 0:
        raise RequestError.about("truncate_prompt_tokens", "must be -1 or at least 1.")
    request = RerankRequest(request_id=request_id, model=model, pairs=pairs, truncates_to=truncates_to)
    # A query counts once for each document, because the model reads it with each.
    check_count(request.num_chars, limits.max_prompt_chars, "characters, with the query of each pair", field=field)
    return request


def _text(document: str | DocumentText) -> str:
    return document if isinstance(document, str) else document.text


def _usage(found: Reranking) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=found.num_prompt_tokens, total_tokens=found.num_prompt_tokens)
