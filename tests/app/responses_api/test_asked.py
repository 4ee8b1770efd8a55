from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.responses_api.asked import chat_of
from app.responses_api.schemas import ResponsesRequest
from tests.app.http.test_field_errors import DEEP
from tests.app.scripted_gateway import ScriptedGateway

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
SCORES = [{"token": "I look.", "logprob": -0.5, "bytes": [73], "top_logprobs": []}]


def chat(**body: Any) -> dict[str, Any]:
    found = chat_of(ResponsesRequest.model_validate({"model": "m"} | body)).model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in found.items() if name != "model"}


def test_items_become_the_turns_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": SCORES}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}", "async": False},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "6"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]

    def call(call_id: str, name: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("1", "f"), call("2", "g")],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "tool", "content": "6", "tool_call_id": "2"},
        {"role": "assistant", "tool_calls": [call("3", "f")], "reasoning_content": "So."},
    ]


def test_thoughts_of_an_answer_that_had_nothing_else_are_not_those_of_the_next() -> None:
    """Some templates refuse a turn with nothing but thoughts; those of an earlier turn, most leave out anyway."""

    def thoughts(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        {"role": "user", "content": "Hi"},
        thoughts("Hm"),
        {"role": "user", "content": "Well?"},
        thoughts("So."),
        {"role": "assistant", "content": "Yes."},
    ]
    assert chat(input=items)["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "So."},
    ]


@pytest.mark.parametrize(
    "empty", [{}, {"summary": None}, {"content": []}, {"content": [{"type": "refusal", "refusal": "No."}]}]
)
def test_thoughts_may_have_no_text(empty: dict[str, Any]) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "reasoning"} | empty, {"role": "assistant", "content": "Yes."}]
    assert chat(input=items)["messages"] == [items[0], items[2]]
    assert "reasoning_content" not in chat(input=[*items[:2], CALL])["messages"][1]


def test_empty_instructions_are_none() -> None:
    """They became a turn of their own, which Gemma's template refuses."""
    assert chat(input="Hi", instructions="")["messages"] == [{"role": "user", "content": "Hi"}]


def test_every_option_reaches_the_chat() -> None:
    schema = {"type": "object"}
    found = chat(
        input="Hi",
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.5,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "mode": "standard", "context": "auto"},
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True, "async": False}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        service_tier="flex",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        prompt_cache_key="k",
        prompt_cache_options={"ttl": "12h"},
        prompt_cache_retention="24h",
    )
    assert found == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "service_tier": "flex",
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "12h"},
        "prompt_cache_retention": "24h",
    }
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "f"}]}
        assert chat(input="Hi", tool_choice=allowed)["tool_choice"] == {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "f"}}]},
        }


def test_what_a_chat_may_say_of_the_choice_of_tokens_a_response_may_say_too() -> None:
    """Load generators ask for `ignore_eos`, as vLLM takes it here too, and none of them got an answer."""
    said = {
        "stop": ["."],
        "seed": 7,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {"5": -1.0},
        "top_k": 3,
        "min_tokens": 4,
        "ignore_eos": True,
        "structured_outputs": {"regex": "a+"},
        "cache_salt": "s",
    }
    vllm_defaults = {"skip_special_tokens": True, "vllm_xargs": {}}
    assert (
        chat(input="Hi", **said, **vllm_defaults)
        == {"messages": [{"role": "user", "content": "Hi"}], "tools": []} | said
    )


async def test_who_refers_to_an_item_is_told_to_send_it(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "input": [{"type": "item_reference", "id": "msg_1"}]}
    error = (await client.post("/v1/responses", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].type", "unsupported_value")
    assert "'store: false'" in error["message"]


TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [], "instructions": ""}, "input"),
        ({"input": "a" * 6000}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [CALL] * 129}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"parameters": DEEP}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}}}, "text.format"),
        ({"reasoning": {"effort": "all"}}, "reasoning.effort"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_field_as_it_was_written(
    client: httpx.AsyncClient, gateway: ScriptedGateway, change: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/responses", json={"model": "base", "input": "Hi"} | change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert gateway.requests == []


async def test_tokens_are_counted_as_they_would_be_read(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    body = {"model": "base", "input": "Hi", "tools": [TOOL], "instructions": "Be brief."}
    counted = (await client.post("/v1/responses/input_tokens", json=body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] > 0
    (prompt,) = gateway.tokenized
    assert [message.role for message in prompt.messages] == ["system", "user"]  # type: ignore[union-attr]
    assert [tool.name for tool in prompt.tools] == ["f"]  # type: ignore[union-attr]
    wrong = await client.post("/v1/responses/input_tokens", json=body | {"temperature": 0})
    assert wrong.json()["error"]["param"] == "temperature"
