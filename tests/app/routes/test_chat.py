from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.schemas.chat import ChatCompletion, ChatCompletionChunk
from deployments.answer_events import EndReason, TextDelta
from deployments.generation import ChatMessage, ChatPrompt
from engine.errors import EngineError, OverloadError, RequestError
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


async def test_what_spells_out_a_default_is_taken(client: httpx.AsyncClient) -> None:
    for change in ({"length_penalty": 1.0}, {"include_reasoning": True}, {"vllm_xargs": {}}, {"later_field": None}):
        assert (await client.post(PATH, json=GOOD | change)).status_code == 200, change
    turn = GOOD["messages"][0] | {"later_field": None}
    assert (await client.post(PATH, json=GOOD | {"messages": [turn]})).status_code == 200


async def test_an_answer_has_every_field_of_the_contract(client: httpx.AsyncClient) -> None:
    answer = (await client.post(PATH, json=GOOD)).json()
    ChatCompletion.model_validate(answer)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "base"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello 🙂", "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 10
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_a_stream_is_role_then_pieces_then_an_empty_delta_then_done(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json=GOOD | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": " 🙂"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]


async def test_asked_for_usage_comes_in_a_chunk_of_its_own_and_is_null_before(client: httpx.AsyncClient) -> None:
    body = GOOD | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events((await client.post(PATH, json=body)).text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 10


async def test_a_refused_input_is_a_content_filter_with_a_refusal(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.pieces, gateway.end, gateway.refusal = [], EndReason.CONTENT_FILTER, "I cannot help with that."
    choice = (await client.post(PATH, json=GOOD)).json()["choices"][0]
    assert choice["finish_reason"] == "content_filter"
    assert choice["message"]["content"] is None
    assert choice["message"]["refusal"] == "I cannot help with that."
    *chunks, _ = events((await client.post(PATH, json=GOOD | {"stream": True})).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks][1:] == [{"refusal": "I cannot help with that."}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"


async def test_an_answer_cut_by_the_filter_keeps_what_was_said(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.end = EndReason.CONTENT_FILTER
    choice = (await client.post(PATH, json=GOOD)).json()["choices"][0]
    assert choice["message"]["content"] == "Hello 🙂"
    assert choice["message"]["refusal"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("Too long: 600 of 512.", field="messages", code="context_length_exceeded"), 400,
         "context_length_exceeded"),
        (OverloadError("Busy.", retry_after_s=2.5), 503, "server_overloaded"),
        (TimeoutError(), 504, "timeout"),
        (EngineError("CUDA error at 0x7f00 in /opt/engine/runner.py"), 500, None),
        (KeyError("secret"), 500, None),
    ],
)  # fmt: skip
async def test_errors_before_the_first_event_have_their_status(
    client: httpx.AsyncClient, gateway: ScriptedGateway, error: Exception, status: int, code: str | None, stream: bool
) -> None:
    gateway.error_before = error
    response = await client.post(PATH, json=GOOD | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert not any(secret in response.text for secret in ("0x", "/opt", "secret", "Traceback"))
    assert response.headers.get("retry-after") in (("3", "4") if status == 503 else (None,))
    assert gateway.num_open == 0


async def test_an_error_in_mid_stream_is_one_event_without_done(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.error_after = EngineError("dead device at 0xdeadbeef")
    response = await client.post(PATH, json=GOOD | {"stream": True})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel", "lo", " 🙂"]
    assert last["error"]["type"] == "server_error"
    assert "0x" not in response.text
    assert gateway.num_open == 0


async def test_an_unknown_model_is_a_404_that_names_it(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post(PATH, json=GOOD | {"model": "nope", "stream": stream})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "nope" in error["message"]


async def test_text_parts_are_joined_and_developers_speak_as_system(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": None, "annotations": []},
    ]
    assert (await client.post(PATH, json=GOOD | {"messages": messages})).status_code == 200
    assert gateway.requests[0].prompt == ChatPrompt(
        messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="ab", name="ann"),
            ChatMessage(role="assistant", content="No."),
        )
    )


async def test_fields_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    body = GOOD | {
        "n": 1, "tools": [], "logprobs": False, "response_format": {"type": "text"}, "logit_bias": {}, "store": False,
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto", "audio": None,
        "stop": None, "temperature": None, "tool_choice": "auto", "parallel_tool_calls": True, "max_tokens": None,
    }  # fmt: skip
    assert (await client.post(PATH, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            PATH,
            GOOD | {"add_generation_prompt": True, "add_special_tokens": False, "echo": False, "chat_template": None},
        ),
        ("/v1/completions", {"model": "base", "prompt": "Hi", "add_special_tokens": True}),
    ],
)
async def test_defaults_that_clients_of_vllm_write_out_are_accepted(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    defaults = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False}
    assert (await client.post(path, json=body | defaults)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_deadline_reaches_the_gateway(client: httpx.AsyncClient, gateway: ScriptedGateway, path: str) -> None:
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        "/v1/responses": {"input": "Hi", "store": False},
        "/v1/completions": {"prompt": "Hi"},
    }[path]
    response = await client.post(path, json={"model": "base"} | asked, headers={"x-request-timeout": "2.5"})
    assert response.status_code == 200
    assert [request.timeout_s for request in gateway.requests] == [2.5]


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
async def test_a_deadline_that_is_none_is_refused(client: httpx.AsyncClient, given: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post("/v1/chat/completions", json=body, headers={"x-request-timeout": given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_prompt_s_scores_are_told_once(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    expected = [None, {"2": {"logprob": -10.0, "rank": 9, "decoded_token": ": "}}]
    asked = GOOD | {"prompt_logprobs": 0, "n": 2}
    answer = (await client.post(PATH, json=asked)).json()
    assert answer["prompt_logprobs"] == expected
    assert [request.params.num_prompt_logprobs for request in gateway.requests] == [0, None]
    chunks = events((await client.post(PATH, json=asked | {"stream": True})).text)[:-1]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [expected]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    del asked["prompt_logprobs"]
    assert "prompt_logprobs" not in (await client.post(PATH, json=asked)).json()


async def test_token_ids_are_returned_if_asked_for(client: httpx.AsyncClient) -> None:
    """In the places where vLLM has them."""
    asked = GOOD | {"return_token_ids": True}
    answer = (await client.post(PATH, json=asked)).json()
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([1, 2], [3, 2, 2])
    first, *others = events((await client.post(PATH, json=asked | {"stream": True})).text)[:-1]
    assert first["prompt_token_ids"] == [1, 2]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    told = [token_id for chunk in others for choice in chunk["choices"] for token_id in choice.get("token_ids", [])]
    assert told == [3, 2, 2]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_log_probabilities_name_tokens_by_id_if_asked_to(client: httpx.AsyncClient, path: str) -> None:
    """Several tokens may have one text, and texts of incomplete characters look alike."""
    chats = path == PATH
    asked = (GOOD | {"logprobs": True, "top_logprobs": 1}) if chats else {"model": "base", "prompt": "a", "logprobs": 1}
    for stream in (False, True):
        response = await client.post(path, json=asked | {"return_tokens_as_token_ids": True, "stream": stream})
        answers = events(response.text)[:-1] if stream else [response.json()]
        found = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
        if chats:
            tokens = [token for one in found for token in one["content"]]
            assert [token["token"] for token in tokens] == ["token_id:3", "token_id:2", "token_id:2"]
            assert [token["top_logprobs"][0]["token"] for token in tokens] == ["token_id:5"] * 3
            assert tokens[0]["bytes"] == [*b"Hel"]
        else:
            assert [token for one in found for token in one["tokens"]] == ["token_id:3", "token_id:2", "token_id:2"]
            assert {"token_id:5", "token_id:3"} == {*found[0]["top_logprobs"][0]}


async def test_reasoning_is_left_out_if_asked_to(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.deltas = [TextDelta(reasoning="Hm"), TextDelta(reasoning="m.", text="Well.")]
    for include_reasoning in (None, True, False):
        asked = GOOD | {"include_reasoning": include_reasoning}
        message = (await client.post(PATH, json=asked)).json()["choices"][0]["message"]
        told = "Hmm." if include_reasoning is not False else None
        assert (message.get("reasoning_content"), message["content"][:5]) == (told, "Well.")
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in events((await client.post(PATH, json=asked | {"stream": True})).text)[:-1]
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (told or "")
        assert "".join(delta.get("content", "") for delta in deltas).startswith("Well.")


@pytest.mark.parametrize(("value", "shows"), [(None, False), (True, False), (False, True)])
async def test_special_tokens_are_shown_if_asked_for(
    client: httpx.AsyncClient, gateway: ScriptedGateway, value: bool | None, shows: bool
) -> None:
    await client.post(PATH, json=GOOD | {"skip_special_tokens": value})
    assert gateway.requests[0].shows_special is shows
