"""Calls and thoughts on the wire: whole answers and streams carry the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ParsedChatCompletionMessage

from app.schemas.chat import ChatCompletion, ChatCompletionChunk
from deployments.answer_events import CallDelta, EndReason, TextDelta
from deployments.generation import ChatMessage, ChatPrompt, ToolCall, ToolSpec
from tests.app.routes.test_chat import GOOD, PATH, events
from tests.app.scripted_gateway import ScriptedGateway

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "D", "parameters": SCHEMA, "strict": True}}]


@pytest.fixture
def calling(gateway: ScriptedGateway) -> ScriptedGateway:
    gateway.deltas = [
        TextDelta(reasoning="Hm"),
        TextDelta(reasoning=".", text="I look."),
        TextDelta(calls=(CallDelta(index=0, call_id="call_a", name="f"), CallDelta(index=0, arguments='{"city"'))),
        TextDelta(calls=(CallDelta(index=0, arguments=': "é"}'), CallDelta(index=1, call_id="call_b", name="g"))),
        TextDelta(calls=(CallDelta(index=1, arguments="{}"),)),
    ]
    gateway.pieces = []
    gateway.end = EndReason.TOOL_CALLS
    gateway.num_reasoning_tokens = 2
    return gateway


async def test_a_whole_answer_has_its_calls_and_thoughts(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    answer = (await client.post(PATH, json=GOOD | {"tools": TOOLS})).json()
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"city": "é"}'}},
            {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
        "reasoning_content": "Hm.",
    }
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    calling.deltas = calling.deltas[2:]
    message = (await client.post(PATH, json=GOOD | {"tools": TOOLS})).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_a_stream_brings_thoughts_text_and_calls_in_pieces(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    *chunks, _ = events((await client.post(PATH, json=GOOD | {"tools": TOOLS, "stream": True})).text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "é"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_answer_may_come_back_inside_its_own_text(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    """OpenAI's agents for JavaScript write it so, and the second turn of every conversation with them was a 400."""
    answer = (await client.post(PATH, json=GOOD | {"tools": TOOLS})).json()["choices"][0]["message"]
    part = answer | {"type": "text", "text": answer["content"]}
    del part["content"]
    turn = {"role": "assistant", "content": [part], "tool_calls": answer["tool_calls"]}
    results = [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in answer["tool_calls"]]
    body = GOOD | {"tools": TOOLS, "messages": [*GOOD["messages"], turn, *results]}
    assert (await client.post(PATH, json=body)).status_code == 200
    prompt = calling.requests[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].content == "I look."
    assert [call.call_id for call in prompt.messages[1].tool_calls] == ["call_a", "call_b"]


async def test_an_answer_that_ended_in_its_thoughts_may_come_back(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    """Clients that keep no empty content could not continue after `max_tokens` had cut the thoughts."""
    turn = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    again = {"role": "user", "content": "Go on."}
    assert (await client.post(PATH, json=GOOD | {"messages": [*GOOD["messages"], turn, again]})).status_code == 200
    assert calling.requests[0].prompt.messages[1] == ChatMessage(role="assistant", content="", reasoning="Hm.")  # type: ignore[union-attr]


async def test_a_parsed_answer_may_come_back_with_what_was_parsed(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    """OpenAI's `parse`, `stream` and `runTools` add it, and send it: the turn after the first call was a 400."""
    answer = (await client.post(PATH, json=GOOD | {"tools": TOOLS})).json()["choices"][0]["message"]
    for call in answer["tool_calls"]:
        call["function"]["parsed_arguments"] = json.loads(call["function"]["arguments"])
    parsed = ParsedChatCompletionMessage[Any].model_validate(answer | {"parsed": {"city": "é"}})
    turn = parsed.model_dump(mode="json", exclude_unset=True)
    assert turn["parsed"] == turn["tool_calls"][0]["function"]["parsed_arguments"] == {"city": "é"}
    results = [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in answer["tool_calls"]]
    body = GOOD | {"tools": TOOLS, "messages": [*GOOD["messages"], turn, *results]}
    assert (await client.post(PATH, json=body)).status_code == 200
    assert [call.arguments for call in calling.requests[1].prompt.messages[1].tool_calls] == ['{"city": "é"}', "{}"]  # type: ignore[union-attr]


async def test_tools_calls_and_results_reach_the_gateway(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    earlier = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body: dict[str, Any] = {
        "messages": [
            *GOOD["messages"],
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [earlier | {"index": 0}]},
            {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "1"},
            {"role": "assistant", "content": "So"},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"title": "T", "text": "D"}],
        "reasoning_effort": "low",
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert (await client.post(PATH, json=GOOD | body)).status_code == 200
    (request,) = gateway.requests
    tool = ToolSpec(name="f", description="D", parameters=SCHEMA, is_strict=True)
    assert request.prompt == ChatPrompt(
        messages=(
            ChatMessage(role="user", content="Hi"),
            ChatMessage(
                role="assistant",
                content="",
                tool_calls=(ToolCall(call_id="1", name="f", arguments="{}"),),
                reasoning="Hm.",
            ),
            ChatMessage(role="tool", content="5", tool_call_id="1"),
            ChatMessage(role="assistant", content="So"),
        ),
        tools=(tool,),
        template_options={"enable_thinking": False, "documents": [{"title": "T", "text": "D"}]},
        continues_final_message=True,
        begins_answer=False,
        reasoning_effort="low",
    )
    assert request.tool_use is not None
    assert request.tool_use.callable_names == {"f"}
    assert json.loads(json.dumps(request.tool_use.tools[0].parameters)) == SCHEMA


async def test_a_null_type_of_an_earlier_call_is_as_if_it_was_absent(client: httpx.AsyncClient) -> None:
    earlier = {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *GOOD["messages"],
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    assert (await client.post(PATH, json=GOOD | {"messages": messages})).status_code == 200
