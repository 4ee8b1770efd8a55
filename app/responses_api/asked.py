"""Translate a Responses API request into a chat request. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from app.http.field_names import FieldName
from app.responses_api.schemas import (
    InputItem,
    InputPart,
    InputTokensRequest,
    ResponsesRequest,
    ResponseToolChoice,
)
from app.responses_api.tools import called_name, offered_functions
from app.schemas.chat import ChatCompletionRequest, Message, ServingOptions
from app.schemas.common import SamplingOptions
from app.schemas.structured import JsonSchemaFormat, ResponseFormat
from app.schemas.tools import (
    MAX_EARLIER_CALLS,
    AllowedTools,
    CalledFunction,
    ChosenFunction,
    EarlierCall,
    NamedTool,
    ToolChoice,
)
from app.translation.bounds import check_count
from engine.errors import RequestError

FIELD_NAMES: dict[str, FieldName] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tool_choice\.allowed_tools\.(tools\[\d+\])\.function": r"tool_choice.\1",
    r"tool_choice\.function": "tool_choice",
}
"""Maps the fields of a chat request, except those of its tools, to their names in this API."""
_AS_IN_A_CHAT = (*SamplingOptions.model_fields, *ServingOptions.model_fields)


def field_names(body: InputTokensRequest) -> dict[str, FieldName]:
    """Return the names in this request of a chat's fields, for error messages."""

    def place(found: re.Match[str]) -> str:
        return next(islice(offered_functions(body.tools or ()), int(found[1]), None)).place

    return FIELD_NAMES | {r"tools\[(\d+)\]\.function": place}


def chat_of(body: InputTokensRequest, earlier: Sequence[InputItem] = ()) -> ChatCompletionRequest:
    """Return the chat request.

    Args:
        body: its input has no references.
        earlier: what it continues.

    Raises:
        RequestError: the input is empty; `top_logprobs` is given without the `include` that it requires; a turn has
            too many calls, or a name is too long.
    """
    # Empty ones are as if they were absent; some templates refuse a system turn.
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    own = body.input
    if isinstance(own, str):
        own = [InputItem(role="user", content=own)]
    messages += _messages([*earlier, *own], first_index=-len(earlier))
    if not own or len(messages) == bool(body.instructions):
        raise RequestError.about("input", "must not be empty.")
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        response_format=_format(body),
        tools=[function.tool for function in offered_functions(body.tools or ())],
        tool_choice=_choice(body.tool_choice) if isinstance(body.tool_choice, ResponseToolChoice) else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **(_sampling(body) if isinstance(body, ResponsesRequest) else {}),
    )


def _sampling(body: ResponsesRequest) -> dict[str, Any]:
    tells_scores = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not tells_scores:
        raise RequestError.about("top_logprobs", "requires 'message.output_text.logprobs' in 'include'.")
    return {name: getattr(body, name) for name in _AS_IN_A_CHAT} | {
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": tells_scores or None,
        "top_logprobs": body.top_logprobs if tells_scores else None,
    }


def _messages(items: Sequence[InputItem], first_index: int) -> list[Message]:
    """Join the reasoning, text and calls of one answer into one assistant turn; errors count from `first_index`."""
    turns: list[Message] = []
    thoughts = ""
    for index, item in enumerate(items, first_index):
        match item.type:
            case "reasoning":
                parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
                thoughts += "".join(part.text or "" for part in parts)
            case "function_call":
                name = called_name(item.name or "", item.namespace, f"input[{index}]")
                call = EarlierCall(
                    id=item.call_id or "", function=CalledFunction(name=name, arguments=item.arguments or "")
                )
                before = turns[-1] if turns and turns[-1].role == "assistant" and not thoughts else None
                calls = [*((before.tool_calls or []) if before is not None else []), call]
                check_count(len(calls), MAX_EARLIER_CALLS, "calls in one turn", field="input")
                if before is not None:
                    turns[-1] = before.model_copy(update={"tool_calls": calls})
                else:
                    turns.append(Message(role="assistant", tool_calls=calls, reasoning_content=thoughts or None))
                    thoughts = ""
            case "function_call_output":
                turns.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
            case "message":
                # Thoughts before another's turn are of an answer that ended in them, and not of the next answer.
                is_answer = item.role == "assistant"
                turns.append(
                    Message(
                        role=item.role or "user",
                        content=_text(item.content),
                        reasoning_content=(thoughts or None) if is_answer else None,
                    )
                )
                thoughts = ""
    return turns


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.to_text() if isinstance(part, InputPart) else part.text for part in content)
    return str(content or "")


def _format(body: InputTokensRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    schema = JsonSchemaFormat.model_validate(
        {"name": wanted.name or "response", "schema": wanted.schema_, "strict": wanted.strict}
    )
    return ResponseFormat(type="json_schema", json_schema=schema)


def _choice(choice: ResponseToolChoice) -> ToolChoice:
    if choice.type == "function":
        return ToolChoice(type="function", function=ChosenFunction(name=choice.name or ""))
    tools = [NamedTool(type="function", function=ChosenFunction(name=tool.name)) for tool in choice.tools or ()]
    return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=tools))
