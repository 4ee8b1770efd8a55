"""A message and the events that stream it, and errors, in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.messages_api.schemas import MessageObject, MessagesError
from deployments.answer_events import CallDelta, EndReason, TextDelta
from engine.errors import EngineError, OverloadError, RequestError
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/messages"
GOOD: dict[str, Any] = {"model": "base", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


async def streamed(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    text = (await client.post(PATH, json=GOOD | {"stream": True}, headers=headers)).text
    events = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture
def calling(gateway: ScriptedGateway) -> ScriptedGateway:
    gateway.deltas = [
        TextDelta(reasoning="Hm.", text="I "),
        TextDelta(text="look."),
        TextDelta(calls=(CallDelta(index=0, call_id="call_a", name="f"), CallDelta(index=0, arguments='{"a"'))),
        TextDelta(calls=(CallDelta(index=0, arguments=":1}"),)),
    ]
    gateway.pieces = []
    gateway.end = EndReason.TOOL_CALLS
    return gateway


async def test_a_whole_message_has_every_field_and_block(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    answer = (await client.post(PATH, json=GOOD)).json()
    MessageObject.model_validate(answer)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_a", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
        },
    }


async def test_integers_of_any_size_stay_what_they_are(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    arguments = '{"a": 123456789012345678901}'
    calling.deltas = [TextDelta(calls=(CallDelta(index=0, call_id="c", name="f", arguments=arguments),))]
    answer = (await client.post(PATH, json=GOOD)).json()
    assert answer["content"][-1]["input"] == {"a": 123456789012345678901}


@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"\\ud83d": 1}', '{"a":' * 300 + "1" + "}" * 300])
async def test_input_of_which_json_cannot_be_written_is_empty(
    client: httpx.AsyncClient, calling: ScriptedGateway, text: str
) -> None:
    """The finished answer was a 500."""

    async def asked(arguments: str) -> Any:
        calling.deltas = [TextDelta(calls=(CallDelta(index=0, call_id="c", name="f", arguments=arguments),))]
        answer = await client.post(PATH, json=GOOD)
        assert answer.status_code == 200
        return answer.json()["content"][-1]["input"]

    assert await asked(text) == {}
    # The whole message is written wherever its input alone is.
    found = [await asked('{"a":' * depth + "1" + "}" * depth) for depth in range(245, 265)]
    assert found[0] != found[-1] == {}


async def test_a_stream_opens_fills_and_closes_its_blocks(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    events = await streamed(client)
    assert [event["type"] for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 3
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[2]["delta"] == {"type": "thinking_delta", "thinking": "Hm."}
    assert events[5]["delta"] == {"type": "text_delta", "text": "I "}
    assert events[8]["content_block"] == {"type": "tool_use", "id": "call_a", "name": "f", "input": {}}
    assert [event["delta"]["partial_json"] for event in events[9:11]] == ['{"a"', ":1}"]
    assert [event["index"] for event in events[1:-2]] == [0] * 3 + [1] * 4 + [2] * 4
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("end", "stop", "reason"),
    [(EndReason.LENGTH, None, "model_context_window_exceeded"), (EndReason.STOP, "}", "stop_sequence")],
)
async def test_a_call_that_was_cut_is_in_a_whole_message_as_in_a_stream(
    client: httpx.AsyncClient, calling: ScriptedGateway, end: EndReason, stop: str | None, reason: str
) -> None:
    calling.deltas, calling.end, calling.stop = calling.deltas[:-1], end, stop
    answer = (await client.post(PATH, json=GOOD)).json()
    opened = [event["content_block"] for event in await streamed(client) if event["type"] == "content_block_start"]
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][-1] == opened[-1] == {"type": "tool_use", "id": "call_a", "name": "f", "input": {}}
    assert answer["stop_reason"] == reason


@pytest.mark.parametrize(
    ("end", "max_tokens", "reason"),
    [
        (EndReason.STOP, 9, "end_turn"),
        (EndReason.LENGTH, 3, "max_tokens"),
        (EndReason.LENGTH, 9, "model_context_window_exceeded"),
        (EndReason.CONTENT_FILTER, 9, "refusal"),
    ],
)
async def test_why_an_answer_ended_is_told_in_anthropic_s_words(
    client: httpx.AsyncClient, gateway: ScriptedGateway, end: EndReason, max_tokens: int, reason: str
) -> None:
    gateway.end = end
    answer = (await client.post(PATH, json=GOOD | {"max_tokens": max_tokens})).json()
    assert answer["stop_reason"] == reason
    assert gateway.requests[0].clips_max_tokens


async def test_errors_have_anthropic_s_shape(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    async def answer(**change: Any) -> tuple[int, str]:
        response = await client.post(PATH, json=GOOD | change)
        MessagesError.model_validate(response.json())
        return response.status_code, response.json()["error"]["type"]

    assert await answer(model="none") == (404, "not_found_error")
    assert await answer(max_tokens=0) == (400, "invalid_request_error")
    assert (await client.post(PATH, content=b"{}")).status_code == 415
    gateway.error_before = OverloadError("full", retry_after_s=3)
    response = await client.post(PATH, json=GOOD)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    assert response.headers["retry-after"] in ("3", "4")
    gateway.error_before = ValueError("secret")
    response = await client.post(PATH, json=GOOD)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in response.text
    gateway.error_before, gateway.error_after = None, EngineError("secret")
    assert (await streamed(client))[-1]["error"]["type"] == "api_error"


async def test_an_error_in_mid_stream_names_anthropic_s_field_and_the_request(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.error_after = RequestError("'response_format' fits nothing.", field="response_format")
    told = (await streamed(client, {"x-request-id": "r1"}))[-1]
    assert (told["error"]["type"], told["request_id"]) == ("invalid_request_error", "r1")
    assert told["error"]["message"] == "'output_config.format' fits nothing."


async def test_a_client_that_asks_for_a_thread_learns_how_to_go_on_without(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json=GOOD | {"thread": {"type": "create"}})
    assert (response.status_code, response.json()["error"]["details"]) == (
        400,
        {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    )
    assert (await client.post(PATH, json=GOOD | {"thread": None})).status_code == 200
    assert "details" not in (await client.post(PATH, json=GOOD | {"max_tokens": 0})).json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", PATH, b"x" * 20_001, 413, "request_too_large"),
        ("POST", f"{PATH}/count_tokens", b"x" * 20_001, 413, "request_too_large"),
        ("GET", f"{PATH}/batches", b"", 404, "not_found_error"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", PATH, b"{", 400, "invalid_request_error"),
    ],
)
async def test_what_no_route_has_seen_is_told_in_the_same_shape(
    client: httpx.AsyncClient, method: str, path: str, body: bytes, status: int, kind: str
) -> None:
    headers = {"content-type": "application/json", "x-request-id": "r1"}
    response = await client.request(method, path, content=body, headers=headers)
    told = MessagesError.model_validate_json(response.content)
    assert (response.status_code, told.error.type, told.request_id) == (status, kind, "r1")
    elsewhere = await client.request(method, "/v1/messagesx", content=body, headers=headers)
    assert elsewhere.json()["error"]["code"] in ("unknown_url", "request_too_large")
