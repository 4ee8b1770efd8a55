from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

import httpx
import openai
import orjson
import pytest
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.http.api import create_app
from app.http.hosts import HostRule
from deployments.generation import ChatPrompt
from engine.errors import EngineError, OverloadError
from tests.app.scripted_gateway import ScriptedGateway
from tests.contract.published import CHECKED


@pytest.fixture
async def sdk(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


JSON = {"content-type": "application/json"}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def test_an_address_without_the_version_is_told_of_it(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        told = [(await http.post(path)).json()["error"]["message"] for path in ("/chat/completions", "/chat/nothing")]
    assert told == [
        "Unknown route: POST /chat/completions. Did you mean /v1/chat/completions?",
        "Unknown route: POST /chat/nothing.",
    ]


async def test_the_sdk_reads_a_whole_answer(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="base", messages=MESSAGES, extra_body={"top_k": 5})
    assert answer.choices[0].message.content == "Hello 🙂"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_the_sdk_reads_a_stream_with_its_usage(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="base", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello 🙂"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10


async def test_the_sdks_stream_helper_assembles_the_answer(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model="base", messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello 🙂"
    assert final.choices[0].finish_reason == "stop"


async def test_the_sdk_completes_lists_and_moderates(sdk: openai.AsyncOpenAI) -> None:
    texts = await sdk.completions.create(model="base", prompt=["a", "b"])
    assert [choice.text for choice in texts.choices] == ["Hello 🙂"] * 2
    assert [model.id async for model in await sdk.models.list()] == ["base", "shout"]
    assert (await sdk.models.retrieve("shout")).id == "shout"
    moderation = await sdk.moderations.create(input="bad")
    assert moderation.results[0].flagged
    assert moderation.results[0].categories.hate
    assert not moderation.results[0].categories.self_harm_intent


async def test_the_sdk_raises_its_own_errors(sdk: openai.AsyncOpenAI, gateway: ScriptedGateway) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await sdk.chat.completions.create(model="base", messages=MESSAGES, temperature=9)
    assert wrong.value.param == "temperature"
    gateway.error_before = OverloadError("Busy.", retry_after_s=500)
    with pytest.raises(openai.InternalServerError) as busy:
        await sdk.chat.completions.create(model="base", messages=MESSAGES)
    assert busy.value.response.headers["retry-after"] == "120"
    gateway.error_before, gateway.error_after = None, EngineError("dead")
    stream = await sdk.chat.completions.create(model="base", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="server had an error"):
        _ = [chunk async for chunk in stream]


async def test_unknown_routes_and_methods_have_openais_shape(client: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/base", 405),
        ("__CLASS__", "/v1/models", 405),
        ("GET", "/v1/models/../../etc/passwd", 404),
    ):
        response = await client.request(method, path)
        assert response.status_code == status, (method, path)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PUT", "/v1/files/file-1", "DELETE, GET, HEAD"),
    ):
        assert (await client.request(method, path)).headers["allow"] == allowed


async def test_only_json_is_read(client: httpx.AsyncClient) -> None:
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"}):
        response = await client.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_media_type"
    json = {"content-type": "application/json; x=y"}
    response = await client.post("/v1/chat/completions", content=b"{}", headers=json)
    assert response.status_code == 400
    response = await client.post("/v1/chat/completions", content=b"{}", headers=json | {"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "content-encoding")
    assert response.headers["accept-encoding"] == "identity"


async def test_a_large_body_is_parsed_off_the_event_loop(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on_loop: list[bool] = []
    parse = orjson.loads

    def loads(body: bytes) -> Any:
        is_on_loop.append(threading.current_thread() is threading.main_thread())
        return parse(body)

    monkeypatch.setattr("app.http.json_route.orjson.loads", loads)
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for text in ("Hi", "Hi" * 50_000):
            body = {"model": "base", "messages": [{"role": "user", "content": text}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            prompt = gateway.requests[-1].prompt
            assert isinstance(prompt, ChatPrompt)
            assert prompt.messages[0].content == text
        doubled = '{"model":"base","model":"base","messages":[' + '{"role":"user","content":"Hi"},' * 5000 + "{}]}"
        for text, code in (
            (doubled, "duplicate_key"),
            ("[" * 100_000, "invalid_json"),
            ("{}" * 50_000, "invalid_json"),
        ):
            refused = await http.post("/v1/chat/completions", content=text, headers=JSON)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert is_on_loop == [True, False, False]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 5}),
        ("/tokenize", "messages", {}),
    ],
)
async def test_so_is_it_validated_and_translated(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, path: str, field: str, more: dict[str, int]
) -> None:
    """100,000 parts of a message held the event loop for most of a second."""
    threads: set[threading.Thread] = set()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            threads.add(threading.current_thread())
            return work(*args)

        return noted

    for place in ("app.schemas.wire._whole", "app.translation.prompts._turn"):
        module, name = place.rsplit(".", 1)
        monkeypatch.setattr(place, noting(getattr(import_module(module), name)))
    turn = {"role": "user", "content": "Hi there, you"}
    body: dict[str, Any] = {"model": "base", field: [turn] * 2000} | more
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post(path, json=body)).status_code == 200
        assert threads
        body[field] = [turn] * 1000 + [turn | {"role": "nobody"}] + [turn] * 1000
        refused = await http.post(path, json=body)
    assert refused.status_code == 400
    assert f"'{field}[1000].role'" in refused.json()["error"]["message"]
    assert threading.main_thread() not in threads


async def test_the_openapi_document_describes_every_answer(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/moderations", "/tokenize",
        "/detokenize", "/health", "/metrics", "/version", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
        "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
        "/v1/messages/count_tokens",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/v1/adapters/{name}/route",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel", "/requests/{request_id}", "/admin/usage", "/admin/usage.csv", "/admin/keys",
        "/admin/keys/{key_id}", "/v1/embeddings", "/classify", "/v1/score", "/v1/rerank",
    }  # fmt: skip
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["responses"]["200"]["content"], path
            assert "422" not in operation["responses"]
            if path.startswith("/v1"):
                assert {"400", "404", "413", "500", "503"} <= set(operation["responses"])
    assert _dangling_references(document) == set()
    # A bare object would tell nothing of its fields.
    assert all("properties" in schema for schema in document["components"]["schemas"].values())
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is False
    assert all("description" in field for field in chat["properties"].values())


async def test_the_document_is_made_once_and_not_on_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams waited for half a second, and for some ms at each further request of whoever needed no key."""
    threads = []

    def noted(**parts: Any) -> Any:
        threads.append(threading.current_thread())
        return get_openapi(**parts)

    monkeypatch.setattr("app.http.openapi.get_openapi", noted)
    first, second = await asyncio.gather(client.get("/openapi.json"), client.get("/openapi.json"))
    assert (first.content, first.headers["content-type"]) == (second.content, "application/json")
    assert threading.main_thread() not in threads
    assert len(threads) == 1


async def test_under_a_route_prefix_the_document_says_so(gateway: ScriptedGateway) -> None:
    transport = httpx.ASGITransport(app=create_app(gateway), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test/llm") as http:
        assert (await http.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]


def _dangling_references(document: dict[str, Any]) -> set[str]:
    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [name for value in node.values() for name in references(value)]
        return [name for value in node for name in references(value)] if isinstance(node, list) else []

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    return set(references(document)) - known


async def test_behind_serve_the_request_id_is_left_to_it(gateway: ScriptedGateway) -> None:
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/health", headers={"x-request-id": "a"})
    assert "x-request-id" not in response.headers


def test_the_application_needs_no_ray() -> None:
    code = "import sys, app.http.api; sys.exit(bool({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PAGE = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


def _asked_by_pages(*origins: str) -> httpx.AsyncClient:
    host_rule = HostRule.of([], is_open=False)
    app = create_app(ScriptedGateway(), allowed_origins=origins, host_rule=host_rule)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", event_hooks=CHECKED)


@pytest.mark.parametrize(("origins", "told"), [((PAGE,), PAGE), (("*",), "*")])
async def test_a_page_of_an_allowed_origin_may_ask_and_read_every_answer(origins: tuple[str, ...], told: str) -> None:
    ask: Any = {"model": "base", "messages": MESSAGES}
    async with _asked_by_pages(*origins) as client:
        may = await client.options("/v1/chat/completions", headers={"origin": PAGE} | PREFLIGHT)
        assert may.status_code == 200
        assert {"authorization", "content-type"} <= set(may.headers["access-control-allow-headers"].split(", "))
        assert "POST" in may.headers["access-control-allow-methods"]
        answers = [may]
        for url, body, status in (
            ("/v1/chat/completions", ask, 200),
            ("/v1/chat/completions", ask | {"stream": True}, 200),
            ("/v1/chat/completions", {}, 400),
            ("/v1/nope", ask, 404),
            ("http://stranger.example/v1/chat/completions", ask, 421),
        ):
            answers.append(await client.post(url, json=body, headers={"origin": PAGE}))
            assert answers[-1].status_code == status
            assert answers[-1].headers["access-control-expose-headers"] == "*"
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {told}
    assert all("access-control-allow-credentials" not in answer.headers for answer in answers)


@pytest.mark.parametrize(("origins", "status"), [((PAGE,), 400), ((), 405)])
async def test_a_page_of_another_origin_may_not(origins: tuple[str, ...], status: int) -> None:
    async with _asked_by_pages(*origins) as client:
        for origin in ("https://app.example.evil.example", "http://app.example", "null"):
            may = await client.options("/v1/chat/completions", headers={"origin": origin} | PREFLIGHT)
            told = await client.get("/v1/models", headers={"origin": origin})
            assert (may.status_code, told.status_code) == (status, 200)
            assert not {"access-control-allow-origin"} & (may.headers.keys() | told.headers.keys())


async def test_the_end_of_the_application_closes_its_gateway(app: FastAPI, gateway: ScriptedGateway) -> None:
    async with app.router.lifespan_context(app):
        assert not gateway.is_closed
    assert gateway.is_closed
