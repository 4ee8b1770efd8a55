"""Translate a Messages API request into a chat request. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

from app.messages_api.schemas import (
    ContentBlock,
    CountRequest,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
)
from app.schemas.chat import ChatCompletionRequest, Message
from app.schemas.structured import JsonSchemaFormat, ResponseFormat
from app.schemas.tools import (
    MAX_EARLIER_CALLS,
    CalledFunction,
    ChosenFunction,
    EarlierCall,
    FunctionDefinition,
    Tool,
    ToolChoice,
)
from app.translation.bounds import check_count, check_depth
from engine.errors import RequestError

FIELD_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice\.function": "tool_choice",
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
}
"""Maps the fields of a chat request to their names in this API, for error messages."""

MAX_INPUT_DEPTH = 512
"""Maximum nesting of an earlier call's input: the JSON writer supports less depth than the reader, 1,024."""
ERROR = "Error"
"""What the model reads of a tool that failed and gave no reason; an empty result would tell of success."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ChatWithHints(ChatCompletionRequest):
    """A chat whose effort is also accepted by models without thinking, because Anthropic's clients always send one."""

    EFFORT_IS_HINT: ClassVar[bool] = True


def chat_of(body: CountRequest) -> ChatCompletionRequest:
    """Return the chat request.

    Raises:
        RequestError: a turn contains a block of a type that its role does not allow; an earlier turn has too many
            calls, or a call's input is nested too deep.
    """
    messages = list(_system(body))
    for index, turn in enumerate(body.messages):
        blocks = turn.content
        if isinstance(blocks, str):
            messages.append(Message(role=turn.role, content=blocks))
        elif turn.role == "user":
            messages += _of_user(blocks, f"messages[{index}].content")
        elif turn.role == "system":
            messages.append(_of_system(blocks, f"messages[{index}].content"))
        else:
            messages.append(_of_assistant(blocks, f"messages[{index}].content"))
    messages = list(_combined(messages))
    if len(messages) > 1 and _is_empty_answer(messages[-1]):
        # Anthropic allows it, and there is nothing to continue.
        messages.pop()
    choice = body.tool_choice
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatWithHints(
        model=body.model,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=_effort(body),
        response_format=_format(body),
        continue_final_message=continues or None,
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    )


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stop": body.stop_sequences,
        "user": None if body.metadata is None else body.metadata.user_id,
    }


def _effort(body: CountRequest) -> Any:
    # As in Anthropic's API, thinking is off by default, if the model offers a choice.
    if body.thinking is None or body.thinking.type == "disabled":
        return "none"
    # As there, an effort that is absent is a high one. Some templates do not reason unless they are told one.
    return (None if body.output_config is None else body.output_config.effort) or "high"


def _format(body: CountRequest) -> ResponseFormat | None:
    wanted = None if body.output_config is None else body.output_config.format
    if wanted is None:
        return None
    schema = JsonSchemaFormat.model_validate({"name": "answer", "schema": wanted.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _system(body: CountRequest) -> Iterator[Message]:
    # An empty one is as if it was absent; some templates refuse a system turn.
    if not body.system:
        return
    if isinstance(body.system, str):
        yield Message(role="system", content=body.system)
    else:
        yield Message(role="system", content="\n\n".join(block.text for block in body.system))


def _of_user(blocks: Sequence[ContentBlock], field: str) -> Iterator[Message]:
    """Yield one turn for each tool result, then the user's text."""
    _check(blocks, ("text", "tool_result"), field)
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            content = block.content or ""
            if not isinstance(content, str):
                _check(content, ("text",), f"{field}[{index}].content")
                content = "".join(part.text or "" for part in content)
            yield Message(
                role="tool", tool_call_id=block.tool_use_id, content=content or (ERROR if block.is_error else "")
            )
    text = "".join(block.text or "" for block in blocks if block.type == "text")
    if text or all(block.type == "text" for block in blocks):
        yield Message(role="user", content=text)


def _combined(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages of which the user's and the assistant's alternate, as Anthropic's API reads them.

    Many templates refuse others. What belongs to one turn of the user are tool results, then a text.
    """
    for role, run in groupby(messages, lambda message: "user" if message.role == "tool" else message.role):
        turns = list(run)
        if role == "assistant":
            yield _joined(turns)
        elif role == "user":
            yield from (turn for turn in turns if turn.role == "tool")
            if said := [turn for turn in turns if turn.role == "user"]:
                yield _joined(said)
        else:
            yield from turns


def _joined(turns: Sequence[Message]) -> Message:
    """Return one turn of the same role that says what these do."""
    first, *others = turns
    if not others:
        return first
    calls = [call for turn in turns for call in turn.tool_calls or ()]
    check_count(len(calls), MAX_EARLIER_CALLS, "calls in a row", field="messages")
    update = {
        "content": "\n\n".join(str(turn.content) for turn in turns if turn.content),
        "tool_calls": calls or None,
        "reasoning_content": "".join(turn.reasoning_content or "" for turn in turns) or None,
    }
    return first.model_copy(update=update)


def _of_system(blocks: Sequence[ContentBlock], field: str) -> Message:
    _check(blocks, ("text",), field)
    return Message(role="system", content="\n\n".join(block.text or "" for block in blocks))


def _of_assistant(blocks: Sequence[ContentBlock], field: str) -> Message:
    _check(blocks, ("text", "tool_use", "thinking", "redacted_thinking"), field)
    calls = [
        EarlierCall(
            id=block.id or "",
            function=CalledFunction.model_construct(
                name=block.name, arguments=_arguments(block.input, f"{field}[{index}].input")
            ),
        )
        for index, block in enumerate(blocks)
        if block.type == "tool_use"
    ]
    check_count(len(calls), MAX_EARLIER_CALLS, "calls", field=field)
    return Message(
        role="assistant",
        content="".join(block.text or "" for block in blocks),
        tool_calls=calls or None,
        reasoning_content="".join(block.thinking or "" for block in blocks) or None,
    )


def _is_empty_answer(turn: Message) -> bool:
    return turn.role == "assistant" and not (turn.content or turn.tool_calls or turn.reasoning_content)


def _tool(tool: MessagesTool) -> Tool:
    # Already checked, here and wherever a function is named: this API's names may be longer than those of chats.
    function = FunctionDefinition.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _arguments(given: dict[str, Any] | None, field: str) -> str:
    check_depth(given, MAX_INPUT_DEPTH, field=field)
    return json.dumps(given, ensure_ascii=False)


def _check(blocks: Sequence[ContentBlock], allowed: Sequence[str], field: str) -> None:
    for index, block in enumerate(blocks):
        if block.type not in allowed:
            place = f"{field}[{index}].type"
            raise RequestError(f"'{place}': a block of type '{block.type}' is not allowed here.", field=place)


def _choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return ToolChoice(type="function", function=ChosenFunction.model_construct(name=choice.name))
    return _CHOICES[choice.type]
