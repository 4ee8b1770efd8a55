from __future__ import annotations

import httpx
import pytest

from deployments.pooled import Pair
from tests.app.scripted_gateway import ScriptedGateway

SCORE, RERANK = "/v1/score", "/v1/rerank"


async def test_scores_come_in_the_order_of_the_pairs(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    answer = (await client.post(SCORE, json={"model": "judge", "text_1": "q", "text_2": ["a", "bcd"]})).json()
    assert answer.pop("id").startswith("score-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "judge",
        "data": [
            {"index": 0, "object": "score", "score": 0.125},
            {"index": 1, "object": "score", "score": 0.375},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert gateway.reranked[0].pairs == (Pair("q", "a", "text_2[0]"), Pair("q", "bcd", "text_2[1]"))


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("q", "a", (Pair("q", "a", "text_2"),)),
        (["q", "r"], ["a", "b"], (Pair("q", "a", "text_2[0]"), Pair("r", "b", "text_2[1]"))),
    ],
)
async def test_texts_pair_up_place_by_place(
    client: httpx.AsyncClient, gateway: ScriptedGateway, text_1: object, text_2: object, pairs: object
) -> None:
    body = {"model": "judge", "text_1": text_1, "text_2": text_2, "truncate_prompt_tokens": -1, "user": "u"}
    for path in (SCORE, "/score"):
        assert (await client.post(path, json=body)).status_code == 200
    assert [(request.pairs, request.truncates_to) for request in gateway.reranked] == [(pairs, -1)] * 2


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
async def test_documents_come_the_best_first(client: httpx.AsyncClient, path: str) -> None:
    documents = ["a", {"text": "bcd"}, "ef", "gh"]
    answer = (await client.post(path, json={"model": "judge", "query": "q", "documents": documents})).json()
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "object": "list",
        "model": "judge",
        "results": [
            {"index": 1, "relevance_score": 0.375, "document": {"text": "bcd"}},
            {"index": 2, "relevance_score": 0.25, "document": {"text": "ef"}},
            {"index": 3, "relevance_score": 0.25, "document": {"text": "gh"}},
            {"index": 0, "relevance_score": 0.125, "document": {"text": "a"}},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    body = {"model": "judge", "query": "q", "documents": documents, "top_n": 1, "return_documents": False}
    (best,) = (await client.post(RERANK, json=body)).json()["results"]
    assert (best["index"], best.get("document")) == (1, None)


@pytest.mark.parametrize(
    ("path", "change", "param", "status"),
    [
        (SCORE, {"text_1": []}, "text_1", 400),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", 400),
        (SCORE, {"text_2": ["a"] * 1001}, "text_2", 400),
        (SCORE, {"text_2": "a" * 6000}, "text_2", 400),
        (SCORE, {"text_2": 5}, "text_2", 400),
        (SCORE, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", 400),
        (SCORE, {"model": "base"}, "model", 404),
        (RERANK, {"documents": []}, "documents", 400),
        (RERANK, {"documents": ["a"] * 1001}, "documents", 400),
        (RERANK, {"documents": ["a", 5]}, "documents[1]", 400),
        (RERANK, {"query": "q" * 3000, "documents": ["a", "b"]}, "documents", 400),
        (RERANK, {"query": None}, "query", 400),
        (RERANK, {"top_n": -1}, "top_n", 400),
        (RERANK, {"max_tokens_per_doc": 5}, "max_tokens_per_doc", 400),
        (RERANK, {"model": "base"}, "model", 404),
    ],
)
async def test_wrong_bodies_name_their_field(
    client: httpx.AsyncClient, path: str, change: dict[str, object], param: str, status: int
) -> None:
    body = {"text_1": "q", "text_2": "a"} if path == SCORE else {"query": "q", "documents": ["a"]}
    response = await client.post(path, json={"model": "judge"} | body | change)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
