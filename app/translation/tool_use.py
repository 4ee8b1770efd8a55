"""Translate the tools of a chat to the functions shown to the model, and those it may call. Pure functions."""

from __future__ import annotations

from typing import Any

from app.schemas.chat import ChatCompletionRequest
from app.schemas.tools import Tool, ToolChoice
from app.settings import LimitSettings
from app.translation.bounds import check_count, check_json
from deployments.generation import ToolSpec, ToolUse
from engine.errors import RequestError

_NEEDS_FREE_TEXT = ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words", "structured_outputs")


def tool_use(body: ChatCompletionRequest, tools: tuple[ToolSpec, ...]) -> ToolUse | None:
    """Return how the answer may call the tools of a chat, None if there are none.

    Raises:
        RequestError: the choice names an unknown tool, or another field requires free text.
    """
    choice = body.tool_choice or "auto"
    if not tools:
        if choice not in ("none", "auto"):
            raise RequestError.about("tool_choice", "needs 'tools'.")
        return None
    for name in _NEEDS_FREE_TEXT:
        if getattr(body, name):
            raise RequestError.about(name, "cannot be used with 'tools'.")
    names = [tool.name for tool in tools]
    callable_names = _callable(choice, names)
    is_required = choice == "required" or (
        not isinstance(choice, str) and (choice.allowed_tools is None or choice.allowed_tools.mode == "required")
    )
    is_one = not isinstance(choice, str) and choice.type == "function"
    return ToolUse(
        tools=tools,
        callable_names=frozenset(callable_names),
        is_required=is_required,
        is_parallel=body.parallel_tool_calls is not False and not is_one,
    )


def tool_specs(tools: list[Tool], limits: LimitSettings) -> tuple[ToolSpec, ...]:
    """Return the functions of a request.

    Raises:
        RequestError: they are too many, too large or nested too deep, or two have the same name.
    """
    check_count(len(tools), limits.max_tools, "tools", field="tools")
    specs: list[ToolSpec] = []
    num_chars = 0
    for index, tool in enumerate(tools):
        function = tool.function
        if any(spec.name == function.name for spec in specs):
            field = f"tools[{index}].function.name"
            raise RequestError.about(field, f"repeats {function.name!r}; names must be unique.")
        parameters: dict[str, Any] = function.parameters or {}
        num_chars += check_json(parameters, limits, field=f"tools[{index}].function.parameters")
        specs.append(
            ToolSpec(
                name=function.name,
                description=function.description or "",
                parameters=parameters,
                is_strict=bool(function.strict),
            )
        )
    check_count(num_chars, limits.max_tools_chars, "characters in all schemas together", field="tools")
    return tuple(specs)


def _callable(choice: str | ToolChoice, names: list[str]) -> list[str]:
    if isinstance(choice, str):
        return [] if choice == "none" else names
    if choice.function is not None:
        _check_named(choice.function.name, names, "tool_choice.function.name")
        return [choice.function.name]
    assert choice.allowed_tools is not None
    allowed = [tool.function.name for tool in choice.allowed_tools.tools]
    for index, name in enumerate(allowed):
        _check_named(name, names, f"tool_choice.allowed_tools.tools[{index}].function.name")
    return allowed


def _check_named(name: str, names: list[str], field: str) -> None:
    if name not in names:
        raise RequestError.about(field, f"is {name!r}, which is not in 'tools'.")
