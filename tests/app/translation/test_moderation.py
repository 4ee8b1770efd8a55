from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.http.api import create_app
from deployments.answer_events import EndReason, Moderated, Verdict
from deployments.generation import Moderation
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/chat/completions"
ASKED = {"model": "guard"}
MILD = Verdict(score_by_hazard={"hate": 0.25, "elections": 0.125}, flagged=())
BAD = Verdict(score_by_hazard={"hate": 0.9, "elections": 0.5}, flagged=("hate",))
UNKNOWN = Verdict(score_by_hazard={}, flagged=(), error="It cannot be reached at /secret/place now.")


def chat(moderation: object = ASKED, **changes: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "moderation": moderation} | changes


async def test_what_is_found_stands_in_the_answer(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.moderation = Moderated(input=MILD, output=BAD)
    answer = (await client.post(PATH, json=chat(n=2))).json()
    found = ChatCompletion.model_validate(answer).moderation
    assert found is not None
    assert found.input.type == found.output.type == "moderation_results"
    (one,) = found.input.results
    assert (one.type, one.model, one.flagged, one.category_scores["hate"]) == (
        "moderation_result",
        "guard",
        False,
        0.25,
    )
    assert [result.flagged for result in found.output.results] == [True, True]
    assert found.output.results[0].categories["hate"] is True
    assert found.output.results[0].category_scores["elections"] == 0.5
    assert "moderation" not in (await client.post(PATH, json=chat(moderation=None))).json()


async def test_a_stream_tells_it_in_a_chunk_of_its_own(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.moderation = Moderated(input=MILD, output=UNKNOWN)
    body = chat(stream=True, stream_options={"include_usage": True})
    lines = [line[6:] for line in (await client.post(PATH, json=body)).text.split("\n") if line.startswith("data: {")]
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines]
    told, counts = chunks[-2:]
    assert all(chunk.moderation is None for chunk in (*chunks[:-2], counts))
    assert (told.choices, json.loads(lines[-2])["usage"]) == ([], None)
    assert told.moderation is not None
    assert told.moderation.input.type == "moderation_results"
    assert told.moderation.output.type == "error"
    assert told.moderation.output.code == "moderation_failed"
    assert told.moderation.output.message == "It cannot be reached at [path] now."


async def test_a_refused_input_has_a_result_and_the_output_none(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.moderation = Moderated(input=BAD, output=None)
    gateway.refusal, gateway.end, gateway.pieces = "No.", EndReason.CONTENT_FILTER, []
    answer = (await client.post(PATH, json=chat())).json()
    assert answer["choices"][0]["finish_reason"] == "content_filter"
    assert answer["moderation"]["input"]["results"][0]["flagged"] is True
    assert answer["moderation"]["output"] == {"type": "moderation_results", "model": "guard", "results": []}


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        (None, (False, False)),
        ({}, (False, False)),
        ({"input": {"mode": "block"}}, (True, False)),
        ({"input": None, "output": {"mode": "block"}}, (False, True)),
        ({"input": {"mode": "score"}, "output": {"mode": "score"}}, (False, False)),
    ],
)
async def test_a_policy_reaches_the_gateway(
    client: httpx.AsyncClient, gateway: ScriptedGateway, policy: object, blocks: tuple[bool, bool]
) -> None:
    gateway.moderation = Moderated(input=MILD, output=MILD)
    asked = {"model": "omni-moderation-latest", "policy": policy}
    assert (await client.post(PATH, json=chat(asked, n=2))).status_code == 200
    wanted = Moderation(blocks_input=blocks[0], blocks_output=blocks[1])
    first, second = (request.moderation for request in gateway.requests)
    assert first == wanted
    # One input, told once.
    assert second == Moderation(tells_input=False, blocks_input=blocks[0], blocks_output=blocks[1])


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({}, 400, "moderation.model"),
        ({"model": "other"}, 404, "moderation.model"),
        ({"model": "guard", "policy": {"input": {"mode": "shout"}}}, 400, "moderation.policy.input.mode"),
        ({"model": "guard", "policy": {"outptu": {"mode": "score"}}}, 400, "moderation.policy.outptu"),
        ("guard", 400, "moderation"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, asked: object, status: int, param: str) -> None:
    response = await client.post(PATH, json=chat(asked))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_without_a_classifier_it_is_refused(gateway: ScriptedGateway) -> None:
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(PATH, json=chat())
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "moderation", "unsupported_parameter")
    assert gateway.requests == []


async def test_the_sdk_s_stream_helper_reads_over_it(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.moderation = Moderated(input=MILD, output=MILD)
    sdk = AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client)
    async with sdk.chat.completions.stream(
        model="base", messages=[{"role": "user", "content": "Hi"}], moderation={"model": "guard"}
    ) as stream:
        whole = await stream.get_final_completion()
    assert whole.choices[0].message.content == "Hello 🙂"
