from __future__ import annotations

from typing import Any

import pytest

from app.schemas.chat import ChatCompletionRequest
from app.settings import LimitSettings
from app.translation.tool_use import tool_specs, tool_use
from deployments.generation import ToolUse
from engine.errors import RequestError

LIMITS = LimitSettings(max_tools=3, max_schema_chars=100, max_tools_chars=150)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def body(**changes: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages} | changes)


def use_of(body: ChatCompletionRequest) -> ToolUse | None:
    return tool_use(body, tool_specs(body.tools or [], LIMITS))


NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}


@pytest.mark.parametrize(
    ("choice", "names", "is_required", "is_parallel"),
    [
        (None, {"f", "g"}, False, True),
        ("auto", {"f", "g"}, False, True),
        ("required", {"f", "g"}, True, True),
        ("none", set(), False, True),
        (NAMED, {"f"}, True, False),
        (ALLOWED, {"g"}, True, True),
        (ALLOWED | {"allowed_tools": {"mode": "auto", "tools": [NAMED]}}, {"f"}, False, True),
    ],
)
def test_the_choice_says_which_tools_can_be_called(
    choice: Any, names: set[str], is_required: bool, is_parallel: bool
) -> None:
    use = use_of(body(tools=[tool("f"), tool("g", strict=True)], tool_choice=choice))
    assert use is not None
    assert (use.callable_names, use.is_required, use.is_parallel) == (names, is_required, is_parallel)
    assert [spec.is_strict for spec in use.tools] == [False, True]


def test_calls_are_one_by_one_where_the_client_says_so() -> None:
    use = use_of(body(tools=[tool("f")], parallel_tool_calls=False))
    assert use is not None
    assert not use.is_parallel
    assert use_of(body(tools=[], tool_choice="auto")) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tools": [tool(name) for name in "abcd"]}, "tools"),
        ({"tools": [tool("f", parameters={"x": "y" * 100})]}, "tools[0].function.parameters"),
        ({"tools": [tool(name, parameters={"x": "y" * 60}) for name in "abc"]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": ALLOWED}, "tool_choice.allowed_tools.tools[0].function.name"),
    ],
)
def test_too_much_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        use_of(body(**changes))
    assert refused.value.field == field
