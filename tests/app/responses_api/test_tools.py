"""Tools as Codex sends them: functions beside namespaces of functions, and a search that may not go out to the web."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.schemas.tools import MAX_TOOLS
from app.settings import LimitSettings
from deployments.answer_events import CallDelta, EndReason, TextDelta
from deployments.generation import ChatPrompt
from tests.app.http.test_field_errors import DEEP
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/responses"
FUNCTION: dict[str, Any] = {"type": "function", "name": "close", "description": "Close a file."}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [
        {"type": "function", "name": name, "description": f"{name} one.", "strict": False} for name in ("open", "close")
    ],
}
SEARCH = {"type": "web_search", "external_web_access": False, "search_context_size": "low"}
GOOD: dict[str, Any] = {"model": "base", "input": "Hi", "tools": [FUNCTION, SEARCH, AGENTS]}


async def test_functions_of_a_namespace_are_told_by_a_name_with_it(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = GOOD | {
        "client_metadata": {"session_id": "s" * 1000},
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "close", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "closed"},
        ],
    }
    answer = (await client.post(PATH, json=body)).json()
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
    prompt = gateway.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(tool.name, tool.description) for tool in prompt.tools] == [
        ("close", "Close a file."),
        ("agents__open", "Helpers.\nopen one."),
        ("agents__close", "close one."),
    ]
    assert [call.name for message in prompt.messages for call in message.tool_calls] == ["agents__close"]


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("close", {"name": "close"}),
        ("agents__close", {"name": "close", "namespace": "agents"}),
    ],
)
async def test_a_call_tells_its_namespace(
    client: httpx.AsyncClient, gateway: ScriptedGateway, called: str, expected: dict[str, str]
) -> None:
    gateway.deltas = [TextDelta(calls=(CallDelta(index=0, call_id="c", name=called, arguments="{}"),))]
    gateway.pieces, gateway.end = [], EndReason.TOOL_CALLS
    (item,) = (await client.post(PATH, json=GOOD)).json()["output"]
    assert {name: item[name] for name in ("name", "namespace") if name in item} == expected
    streamed = (await client.post(PATH, json=GOOD | {"stream": True})).text
    assert '"name":"agents__close"' not in streamed


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([SEARCH | {"external_web_access": True}], "tools[0].type"),
        ([{"type": "code_interpreter"}], "tools[0].type"),
        ([SEARCH | {"query": "x"}], "tools[0].query"),
        ([{"type": "namespace", "name": "agents"}], "tools[0].tools"),
        ([AGENTS | {"name": "a.b"}], "tools[0].name"),
        ([AGENTS | {"tools": [SEARCH]}], "tools[0].tools[0].type"),
        ([FUNCTION, AGENTS | {"name": "n" * 60}], "tools[1].tools[0].name"),
        ([FUNCTION, AGENTS, AGENTS], "tools[2].tools[0].name"),
        ([FUNCTION, AGENTS | {"tools": [FUNCTION | {"parameters": DEEP}]}], "tools[1].tools[0].parameters"),
    ],
)
async def test_what_is_wrong_with_a_tool_is_told_where_it_stands(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tools: list[dict[str, Any]], param: str
) -> None:
    response = await client.post(PATH, json=GOOD | {"tools": tools})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/chat/completions", "/tokenize"])
async def test_more_tools_than_any_configuration_allows_are_not_looked_at(client: httpx.AsyncClient, path: str) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}
    body = {PATH: {"model": "base", "input": "Hi"}, "/v1/messages": chat | {"max_tokens": 1}}.get(path, chat)
    many: list[Any] = [{}] * (MAX_TOOLS + 1)
    in_namespaces = [AGENTS | {"tools": many[:2500]}] * 2
    for tools in (many, in_namespaces) if path == PATH else (many,):
        error = (await client.post(path, json=body | {"tools": tools})).json()["error"]
        assert error["message"] == f"Invalid value: 'tools' must have at most {MAX_TOOLS} items."
    with pytest.raises(ValidationError):
        LimitSettings(max_tools=MAX_TOOLS + 1)


async def test_an_earlier_call_whose_name_is_too_long_with_its_namespace_is_a_400(client: httpx.AsyncClient) -> None:
    call = {"type": "function_call", "call_id": "1", "namespace": "n" * 40, "name": "f" * 40, "arguments": "{}"}
    error = (await client.post(PATH, json=GOOD | {"input": [call]})).json()["error"]
    assert error["param"] == "input[0].name"
