from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.messages_api.asked import chat_of
from app.messages_api.schemas import MessagesRequest
from app.settings import LimitSettings
from app.translation.prompts import chat_prompt
from deployments.generation import ChatPrompt
from deployments.tokenizer.chat_template import ChatTemplate, turn_fields
from tests.app.http.test_field_errors import DEEP
from tests.app.scripted_gateway import ScriptedGateway

GOOD: dict[str, Any] = {"model": "base", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL_USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULTS = [{"type": "tool_result", "tool_use_id": "1", "content": content} for content in ("5", [TOOL_USE])]
TOLD_TO_THINK = "{% for m in messages %}{% endfor %}{% if thinking %}<think>{% endif %}"
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": ""}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


def chat(**body: Any) -> dict[str, Any]:
    found = chat_of(MessagesRequest.model_validate(GOOD | body)).model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in found.items() if name != "model"}


def test_blocks_become_the_turns_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {
            "role": "assistant",
            "content": [
                THINKING,
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "é"}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "5"}]},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "briefer."}]},
    ]
    found = chat(messages=messages, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    assert found["messages"] == [
        {"role": "system", "content": "Be\n\nbrief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Be\n\nbriefer."},
    ]
    assert "continue_final_message" not in found
    begun = [*messages[:1], {"role": "assistant", "content": "So"}]
    assert chat(messages=begun)["continue_final_message"] is True


def test_turns_in_a_row_are_one() -> None:
    """Anthropic's API combines them, and templates that want user and assistant to alternate refused them."""
    other_call = TOOL_USE | {"id": "2"}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
        {"role": "user", "content": [{"type": "text", "text": "there"}]},
        {"role": "assistant", "content": [THINKING]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
        {"role": "assistant", "content": [TOOL_USE]},
        {"role": "assistant", "content": [other_call]},
        {"role": "user", "content": "Wait"},
        {"role": "user", "content": [RESULTS[0], {"type": "text", "text": "and see."}]},
        {"role": "user", "content": [RESULTS[0] | {"tool_use_id": "2"}]},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": ""},
    ]
    found = chat(messages=messages)
    assert found["continue_final_message"] is True
    calls = [{"id": number, "type": "function", "function": {"name": "f", "arguments": "{}"}} for number in ("1", "2")]
    assert found["messages"] == [
        {"role": "user", "content": "Hi\n\nthere"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "tool", "content": "5", "tool_call_id": "2"},
        {"role": "user", "content": "Wait\n\nand see."},
        {"role": "assistant", "content": "So"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_every_option_reaches_the_chat(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    schema = {"type": "object"}
    found = chat(
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        tools=[TOOL | {"description": "D", "strict": True}],
        tool_choice=choice,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    function = {"name": "f", "description": "D", "parameters": schema, "strict": True}
    assert (
        found
        == {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "stop": ["x"],
            "user": "u",
            "tools": [{"type": "function", "function": function}],
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }
        | expected
    )


async def test_a_tool_s_name_may_have_128_characters_unlike_those_of_chats(client: httpx.AsyncClient) -> None:
    """Agents join the names of a server and its tool; one such tool made each request of a session a 400."""
    name = "mcp__server__" + "a" * 115
    call = TOOL_USE | {"name": name}
    turns = [*GOOD["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": RESULTS[:1]}]
    choice = {"type": "tool", "name": name}
    body = GOOD | {"messages": turns, "tools": [TOOL | {"name": name}], "tool_choice": choice}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    found = chat(messages=turns, tools=body["tools"], tool_choice=choice)
    assert found["tools"][0]["function"]["name"] == found["tool_choice"]["function"]["name"] == name
    assert found["messages"][1]["tool_calls"][0]["function"]["name"] == name
    refused = await client.post("/v1/messages", json=body | {"tools": [TOOL | {"name": name + "a"}]})
    assert (refused.status_code, "'tools[0].name'" in refused.json()["error"]["message"]) == (400, True)
    function = {"type": "function", "function": {"name": name}}
    chatted = {"model": "base", "messages": GOOD["messages"], "tools": [function]}
    assert (await client.post("/v1/chat/completions", json=chatted)).status_code == 400


@pytest.mark.parametrize("empty", [{}, {"content": ""}, {"content": []}])
def test_a_tool_that_failed_without_a_word_is_told_from_one_that_had_nothing_to_say(empty: dict[str, Any]) -> None:
    def result(**more: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "1"} | empty | more
        return chat(messages=[{"role": "user", "content": [block]}])["messages"][-1]["content"]

    assert [result(is_error=is_error) for is_error in (None, False, True)] == ["", "", "Error"]
    assert result(is_error=True, content="No such city.") == "No such city."


@pytest.mark.parametrize("system", ["", [], None])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    """An empty text became a turn of its own, which Gemma's template refuses."""
    assert chat(system=system)["messages"] == GOOD["messages"]


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_a_final_answer_that_is_still_empty_is_begun_instead_of_continued(content: Any) -> None:
    """Anthropic allows only this turn to be empty; it was refused, as there is nothing to continue."""
    found = chat(messages=[*GOOD["messages"], {"role": "assistant", "content": content}])
    assert found["messages"] == GOOD["messages"]
    assert "continue_final_message" not in found


def test_a_model_thinks_only_where_it_is_asked_to() -> None:
    assert chat()["reasoning_effort"] == "none"
    assert chat(thinking={"type": "disabled"})["reasoning_effort"] == "none"


@pytest.mark.parametrize("more", [{}, {"output_config": {}}])
def test_thinking_is_turned_on_whatever_the_template_does_by_default(more: dict[str, Any]) -> None:
    """Templates that reason only if they are told to, as DeepSeek's and Granite's, were not, and no thoughts came."""
    for thinking in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}):
        asked = chat_of(MessagesRequest.model_validate(GOOD | {"thinking": thinking} | more))
        prompt = chat_prompt(asked, LimitSettings())
        template = ChatTemplate({"default": TOLD_TO_THINK}, {}, max_chars=1000)
        assert template.render(turn_fields(prompt.messages), (), prompt) == "<think>"


async def test_an_effort_is_a_hint_also_where_tokens_are_counted(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    """Claude Code names one in every request, whatever the model."""
    body = GOOD | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    del body["max_tokens"]
    assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 200
    for prompt in (gateway.requests[0].prompt, gateway.tokenized[0]):
        assert isinstance(prompt, ChatPrompt)
        assert (prompt.reasoning_effort, prompt.effort_is_hint) == ("high", True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": [TOOL_USE]}]}, "messages[0].content[0].type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": RESULTS}]}, "messages[0].content[1].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [TOOL_USE] * 129}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [TOOL_USE] * 65}] * 2}, "messages"),
        ({"messages": [*GOOD["messages"], {"role": "assistant", "content": [THINKING]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 6000}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"input_schema": DEEP}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_field_as_it_was_written(
    client: httpx.AsyncClient, gateway: ScriptedGateway, change: dict[str, Any], field: str
) -> None:
    response = await client.post("/v1/messages", json=GOOD | change)
    assert response.status_code == 400
    assert f"'{field}'" in response.json()["error"]["message"]
    assert gateway.requests == []


async def test_tokens_are_counted_as_they_would_be_read(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    body = {name: value for name, value in GOOD.items() if name != "max_tokens"}
    answer = await client.post("/v1/messages/count_tokens", json=body | {"tools": [TOOL], "system": "Be brief."})
    assert answer.json()["input_tokens"] > 0
    (prompt,) = gateway.tokenized
    assert [message.role for message in prompt.messages] == ["system", "user"]  # type: ignore[union-attr]
    assert [tool.name for tool in prompt.tools] == ["f"]  # type: ignore[union-attr]


async def test_a_call_s_input_is_bounded_in_depth(client: httpx.AsyncClient) -> None:
    """What can be read, but no more be written, was a 500."""

    def asked(depth: int) -> bytes:
        nested = '{"a":' * depth + "1" + "}" * depth
        call = f'{{"type":"tool_use","id":"t","name":"f","input":{nested}}}'
        result = '{"role":"user","content":[{"type":"tool_result","tool_use_id":"t"}]}'
        return f'{{"model":"base","messages":[{{"role":"assistant","content":[{call}]}},{result}]}}'.encode()

    json_type = {"content-type": "application/json"}
    for depth in (513, 850):
        refused = await client.post("/v1/messages/count_tokens", content=asked(depth), headers=json_type)
        assert refused.status_code == 400
        assert "'messages[0].content[0].input' is nested" in refused.json()["error"]["message"]
    assert (await client.post("/v1/messages/count_tokens", content=asked(512), headers=json_type)).status_code == 200
