"""Hostile bodies, through the whole application: every one is a 4xx in OpenAI's shape that names its field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.http import field_errors
from app.http.field_errors import invalid_body
from app.messages_api.schemas import MessagesRequest
from app.responses_api.schemas import ResponsesRequest
from app.schemas.chat import ChatCompletionRequest
from app.schemas.wire import WireRequest
from tests.app.scripted_gateway import ScriptedGateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"type": "object", "properties": DEEP}
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "a" * 300}, "model"),
    ({"model": ["base"]}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "king", "content": ""}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "function", "content": "", "name": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "tool", "content": ""}]}, "messages[1].tool_call_id"),
    ({"messages": [USER | {"tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [USER | {"nme": "x"}]}, "messages[0].nme"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [USER | {"refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [USER] * 9}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 6000}]}, "messages"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 10**300}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": 2**200}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_base": 0.5}, "dry_base"),
    ({"dry_allowed_length": 0}, "dry_allowed_length"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
    ({"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers"),
    ({"lz_penalty": 3}, "lz_penalty"),
    ({"lz_buffer_size": 0}, "lz_buffer_size"),
    ({"lz_lookback_size": 2**20}, "lz_lookback_size"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a" * 300]}, "stop[0]"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"priority": 2**31}, "priority"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 65}"),
    ({"store": True}, "store"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL] * 200}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "min_tokens": 3}, "min_tokens"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": NAMED | {"function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): 1 for i in range(33)}}, "chat_template_kwargs"),
    ({"documents": ["D"]}, "documents[0]"),
    ({"documents": [{"x": DEEP}]}, "documents"),
    ({"documents": [{"text": "x" * 6000}]}, "documents"),
    ({"documents": [{}], "chat_template_kwargs": {"documents": [{}]}}, "documents"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
    ),
    ({"logits_processors": ["a"]}, "logits_processors"),
    ({"return_token_ids": 7}, "return_token_ids"),
    ({"functions": [{}]}, "functions"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"prediction": "the answer"}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "static", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type"),
    ({"prediction": {"type": "content", "content": "x" * 5001}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": "x", "speed": 9}}, "prediction.speed"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options.mode"),
    ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
    ({"reasoning_effort": "all"}, "reasoning_effort"),
    ({"service_tier": "scale"}, "service_tier"),
    ({"service_tier": "flex", "priority": 1}, "service_tier"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template": "{% for i in range(999999999) %}{% endfor %}"}, "chat_template"),
    ({"temprature": 1}, "temprature"),
    ({"__class__": "x"}, "__class__"),
    ({"": 1}, ""),
]


@pytest.mark.parametrize(("change", "param"), WRONG_CHATS, ids=lambda value: str(value)[:60])
async def test_a_wrong_chat_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, gateway: ScriptedGateway, change: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json={"model": "base", "messages": [USER]} | change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "") == param
    assert not gateway.requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": "a" * 6000}, "prompt"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "x", "echo": True}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": [USER]}, "messages"),
    ],
)
async def test_a_wrong_completion_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    response = await client.post(TEXT, json={"model": "base", "prompt": "Hi"} | change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "base", "messages": [{"role": "user", "content": "\\udc00"}]}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": 1e400}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 10_000 + b"}",
        b'{"model": "base", "messages": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"model": "base", "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_what_is_no_json_object_of_ours_is_a_400(client: httpx.AsyncClient, body: bytes) -> None:
    for path in (CHAT, TEXT, "/v1/moderations"):
        response = await client.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_messages_name_the_bound_and_suggest_the_near_name(client: httpx.AsyncClient) -> None:
    async def message(change: dict[str, Any]) -> str:
        response = await client.post(CHAT, json={"model": "base", "messages": [USER]} | change)
        return str(response.json()["error"]["message"])

    assert await message({"temperature": 3}) == "Invalid value: 'temperature' must be at most 2.0."
    assert await message({"temprature": 1}) == "Unknown parameter: 'temprature'. Did you mean 'temperature'?"
    assert await message({"stop": 5}) == "Invalid value: 'stop' must be a string or an array."
    assert await message({"store": True}) == "Unsupported: 'store': this server does not support it yet."
    assert await message({"messages": [USER] * 9}) == "'messages' accepts at most 8 items; 9 were given."
    assert await message({"messages": []}) == "Invalid value: 'messages' must have at least 1 item."
    assert await message({"top_k": 10**30}) == "Invalid value: 'top_k' must be at most 2147483647."
    assert await message({"priority": -(10**30)}) == "Invalid value: 'priority' must be at least -2147483648."
    assert await message({"seed": -(2**63) - 1}) == f"Invalid value: 'seed' must be at least {-(2**63)}."
    assert (await client.post(CHAT, json={"model": "base", "messages": [USER], "seed": -(2**63)})).status_code == 200
    assert await message({"stop_token_ids": [1, 2**64]}) == (
        "Invalid value: 'stop_token_ids[1]' must be an integer of at most 64 bits."
    )
    assert await message({"": 1}) == "Unknown parameter: ''."
    replaced = await message({"guided_json": {"type": "object"}})
    assert replaced == "Unknown parameter: 'guided_json'. Did you mean 'structured_outputs'?"
    schema = {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}
    where = "Invalid value: 'response_format.json_schema.name' must match the pattern "
    assert await message({"response_format": schema}) == where + "^[a-zA-Z0-9_-]{1,64}$."


@pytest.mark.parametrize("name", ["prompt_token_ids", "stop_regex"])
async def test_another_word_is_no_hint(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post(CHAT, json={"model": "base", "messages": [USER], name: True})
    assert response.json()["error"]["message"] == f"Unknown parameter: '{name}'."


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"NaN", "NaN is no JSON number"),
        (b"-Infinity", "-Infinity is no JSON number"),
        (b"1e999", "a number is beyond what a double holds, 1.8e308"),
        (b"1" * 5000, "a number is beyond what a double holds, 1.8e308"),
        (b'"\\ud800"', "a string has a lone surrogate"),
        (b'"\\udc00"', "a string has a lone surrogate"),
        (b"[" * 1500 + b"]" * 1500, "it is nested too deep; some 900 levels are read"),
        (b'"\xff"', "it is not UTF-8"),
        (b"nan", "invalid literal, expected 'null', at character 27"),
        (b"", "unexpected character, expected a JSON value, at character 27"),
        (b"1,", "trailing comma is not allowed, at character 28"),
    ],
    ids=lambda value: repr(value[:20]),
)
async def test_what_is_no_json_is_told_why(client: httpx.AsyncClient, value: bytes, reason: str) -> None:
    response = await client.post(CHAT, content=b'{"model": "base", "user": ' + value + b"}", headers=JSON)
    error = response.json()["error"]
    assert (error["message"], error["code"]) == (f"The request body is not valid JSON: {reason}.", "invalid_json")


def _schemas(parent: type[WireRequest]) -> Iterator[type[WireRequest]]:
    for schema in parent.__subclasses__():
        yield schema
        yield from _schemas(schema)


SCALARS: list[Any] = [None, True, "", "a b", -1, 1.5, 1e300, 10**30, 2**63]
ODD: list[Any] = [
    *SCALARS,
    {},
    {"nope": 1},
    {"": {}},
    {"1": 0},
    {"x": 5},
    [],
    [{}],
    [[]],
    *([scalar] for scalar in SCALARS),
]


def _wrong(node: dict[str, Any], defined: dict[str, Any], depth: int) -> Iterator[Any]:
    """Yield values of which nearly none is right for a JSON schema, and which reach into each of its branches."""
    yield from ODD
    if depth == 0:
        return
    node = defined[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    for choice in node.get("anyOf", []):
        yield from _wrong(choice, defined, depth - ("$ref" not in choice))
    if "items" in node:
        yield from ([item] for item in _wrong(node["items"], defined, depth - 1))
    for name, inner in node.get("properties", {}).items():
        others = {other: value["const"] for other, value in node["properties"].items() if "const" in value}
        yield from (others | {name: value} for value in _wrong(inner, defined, depth - 1))
        for kind in node["properties"].get("type", {}).get("enum", []):
            yield {"type": kind}


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def test_nothing_of_pydantic_reaches_a_client() -> None:
    """A field was `tool_choice.function-after[_has_what_its_type_says(), ToolChoice].type`."""
    schemas = set(_schemas(WireRequest))
    assert {ChatCompletionRequest, ResponsesRequest, MessagesRequest} < schemas
    for schema in schemas:
        document = schema.model_json_schema()
        defined = document.get("$defs", {})
        names = {name for one in (document, *defined.values()) for name in one.get("properties", {})}
        for body in _wrong(document, defined, 4):
            try:
                schema.model_validate(body)
            except ValidationError as failed:
                placed = [error | {"loc": ("body", *error["loc"])} for error in failed.errors()]
                error = invalid_body(placed, body)
                parts = set(re.split(r"\.|\[\d+\]", error.param or "")) - {""}
                assert parts <= names | set(_keys(body)), (error.message, body)
                assert not re.search(r"should|pydantic|\bInput\b|function-", error.message), (error.message, body)


async def test_codes_tell_unknown_from_unsupported_from_wrong(client: httpx.AsyncClient) -> None:
    codes = {}
    for change in (
        {"store": True},
        {"n": 500},
        {"temprature": 1},
        {"temperature": "1"},
        {"temperature": 9},
        {"model": None},
    ):
        response = await client.post(CHAT, json={"model": "base", "messages": [USER]} | change)
        codes[next(iter(change))] = response.json()["error"]["code"]
    assert codes == {
        "store": "unsupported_parameter",
        "n": "invalid_value",
        "temprature": "unknown_parameter",
        "temperature": "invalid_value",
        "model": "invalid_type",
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [], "model": "base", "model": "shout"}', "model"),
        (b'{"model": "base", "messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    ],
)
async def test_a_key_that_stands_twice_is_refused(client: httpx.AsyncClient, body: bytes, param: str) -> None:
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "duplicate_key")


async def test_no_key_stands_twice_beside_what_is_nested_too_deep_to_look(client: httpx.AsyncClient) -> None:
    deep = b'{"model": "base", "model": "other", "tools": ' + b"[" * 1010 + b"]" * 1010 + b"}"
    response = await client.post(CHAT, content=deep, headers=JSON)
    # Newer versions of Python look deeper.
    assert response.status_code == 400
    assert response.json()["error"]["code"] in {"invalid_json", "duplicate_key"}


@pytest.mark.parametrize("field", ["stop", "tools", "messages"])
def test_of_a_list_one_wrong_item_is_looked_at(field: str) -> None:
    """To collect an error for each of a million held up everybody."""
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({"model": "base", "messages": [USER], field: [7] * 50})
    assert {error["loc"][0] for error in refused.value.errors()} == {field}
    assert refused.value.error_count() <= 2


@pytest.mark.parametrize("field", ["metadata", "client_metadata"])
def test_of_an_object_one_wrong_text_is_looked_at(field: str) -> None:
    body = {"model": "base", "input": "Hi", field: {"a": "b"} | {f"k{index}": index for index in range(50)}}
    with pytest.raises(ValidationError) as refused:
        ResponsesRequest.model_validate(body)
    assert [(error["loc"], error["type"]) for error in refused.value.errors()] == [((field, "k0"), "string_type")]


def test_of_many_wrong_values_of_an_object_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """60,000 of them in one body held up all streams of a gateway for half a second."""
    looked_at = []

    def seen(error: Mapping[str, Any], body: object) -> Any:
        looked_at.append(error)
        return failure(error, body)

    failure = field_errors._failure
    monkeypatch.setattr(field_errors, "_failure", seen)
    body = {"model": "base", "messages": [USER], "logit_bias": {str(index): "x" for index in range(5000)}}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    assert invalid_body(caught.value.errors(), body).param == "logit_bias.0"
    assert len(looked_at) == 1000


def test_of_too_many_biases_none_is_looked_at() -> None:
    body = {"model": "base", "messages": [USER], "logit_bias": dict.fromkeys(map(str, range(65_537)), "x")}
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate(body)
    assert [error["type"] for error in refused.value.errors()] == ["too_long"]


@pytest.mark.parametrize("body", [b"{", b"[" * 1000, b"[" * 100_000, b'{"a":' * 1020 + b"1" + b"}" * 1020, b"\xff"])
async def test_what_is_no_json_or_too_deep_is_refused_by_who_reads_it(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post(CHAT, content=body[:19_000], headers={"content-type": "application/json"})
    assert response.status_code == 400
