"""Translate what a request is about to the gateway's prompts: turns with tools, texts, or token ids.

Pure. Every failure is a `RequestError`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard, cast

from app.schemas.chat import ChatCompletionRequest, Message
from app.schemas.completions import CompletionRequest
from app.schemas.tokens import TokenizeRequest
from app.settings import LimitSettings
from app.translation.bounds import check_chars, check_count, check_depth, check_json
from app.translation.tool_use import tool_specs
from deployments.generation import DOCUMENTS, ChatMessage, ChatPrompt, TextPrompt, TokenPrompt, ToolCall
from deployments.prompt_texts import num_chars
from engine.errors import RequestError


def chat_prompt(body: ChatCompletionRequest | TokenizeRequest, limits: LimitSettings) -> ChatPrompt:
    """Return the prompt of a chat. The template gets `developer` messages as `system`."""
    check_count(len(body.messages or ()), limits.max_messages, "items", field="messages")
    turns = tuple(map(_turn, body.messages or ()))
    check_chars(num_chars(ChatPrompt(messages=turns)), limits, field="messages")
    if body.continue_final_message and (turns[-1].role != "assistant" or not turns[-1].content):
        raise RequestError.about(
            "continue_final_message", "requires the last message to be an assistant message with content."
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError.about("add_generation_prompt", "and 'continue_final_message' cannot both be true.")
    return ChatPrompt(
        messages=turns,
        tools=tool_specs(body.tools or [], limits),
        template_options=_template_options(body, limits),
        continues_final_message=bool(body.continue_final_message),
        begins_answer=not body.continue_final_message and body.add_generation_prompt is not False,
        reasoning_effort=body.reasoning_effort,
        effort_is_hint=body.EFFORT_IS_HINT,
    )


def _template_options(body: ChatCompletionRequest | TokenizeRequest, limits: LimitSettings) -> dict[str, Any]:
    options = body.chat_template_kwargs or {}
    check_json(options, limits, field="chat_template_kwargs")
    if not body.documents:
        return options
    if DOCUMENTS in options:
        raise RequestError.about(DOCUMENTS, "excludes 'chat_template_kwargs.documents'.")
    check_depth(body.documents, limits.max_schema_depth, field=DOCUMENTS)
    check_chars(len(json.dumps(body.documents, ensure_ascii=False)), limits, field=DOCUMENTS)
    return options | {DOCUMENTS: body.documents}


def _turn(message: Message) -> ChatMessage:
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=message.to_text(),
        name=message.name,
        tool_calls=tuple(
            ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
    )


def text_prompts(body: CompletionRequest, limits: LimitSettings) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the prompts of a text completion, in order."""
    prompts = plain_prompts(body.prompt, limits.max_prompts, "prompts", field="prompt")
    if body.add_special_tokens is False:
        prompts = tuple(
            replace(prompt, has_special_tokens=False) if isinstance(prompt, TextPrompt) else prompt
            for prompt in prompts
        )
    if body.suffix:
        prompts = _with_suffix(prompts, body.suffix, echoes=bool(body.echo))
    check_size(prompts, limits, field="prompt")
    return prompts


def _with_suffix(prompts: Sequence[TextPrompt | TokenPrompt], suffix: str, *, echoes: bool) -> tuple[TextPrompt, ...]:
    texts = [prompt for prompt in prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(prompts):
        raise RequestError.about("suffix", "requires prompts that are text.")
    if echoes:
        raise RequestError.about("suffix", "and 'echo' cannot be combined.")
    return tuple(replace(prompt, suffix=suffix) for prompt in texts)


def plain_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], bound: int, what: str, *, field: str
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the prompts of a `WirePrompt`, in order; the other arguments are those of `check_count`."""
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt),)
    if _is_token_ids(prompt):
        return (TokenPrompt(token_ids=tuple(prompt)),)
    # Counted first: a million of them take seconds to make.
    check_count(len(prompt), bound, what, field=field)
    return tuple(
        TextPrompt(text=item) if isinstance(item, str) else TokenPrompt(token_ids=tuple(item))
        for item in cast("list[str] | list[list[int]]", prompt)
    )


def _is_token_ids(prompt: list[str] | list[int] | list[list[int]]) -> TypeGuard[list[int]]:
    return isinstance(prompt[0], int)


def check_size(prompts: Sequence[TextPrompt | TokenPrompt], limits: LimitSettings, *, field: str) -> None:
    """Check that the texts, or the token ids, of all prompts together are not too many."""
    sizes = (num_chars(prompt) if isinstance(prompt, TextPrompt) else len(prompt.token_ids) for prompt in prompts)
    check_chars(sum(sizes), limits, field=field)


def tokenized_prompt(body: TokenizeRequest, limits: LimitSettings) -> ChatPrompt | TextPrompt:
    """Return the prompt to tokenize."""
    if body.messages is not None:
        return chat_prompt(body, limits)
    text = body.prompt or ""
    check_chars(len(text), limits, field="prompt")
    return TextPrompt(text=text, has_special_tokens=body.add_special_tokens is not False)
