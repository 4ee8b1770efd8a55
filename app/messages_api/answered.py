"""Translate the answer to a chat into an Anthropic message, whole or as stream events; and errors likewise."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from app.http.errors import ApiError
from app.http.sse import typed_frame
from app.messages_api.schemas import (
    MessageObject,
    MessagesError,
    MessagesErrorDetail,
    MessagesTokensDetails,
    MessagesUsage,
    ModelInfo,
    ModelPage,
    StopReason,
)
from app.translation.blocks import Block, BlockKind, BlockReader, Step, blocks_of
from app.translation.render import ResponseHead
from app.translation.streaming import Answer, ChoiceEvent
from deployments.answer_events import EndReason, Finished, Started, TextDelta
from deployments.generation import ModelCard

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Makes Anthropic's clients, which request threads on their own, fall back to sending the whole conversation."""


def message(head: ResponseHead, answer: Answer, *, max_tokens: int) -> MessageObject:
    """Return a whole answer; a call whose input is not valid JSON, as that of a truncated one, has an empty one."""
    return MessageObject(
        id=head.response_id,
        model=head.model,
        content=[_content(block) for block in blocks_of(answer)],
        stop_reason=stop_reason(answer.finished, max_tokens),
        stop_sequence=answer.finished.stop,
        usage=_whole_usage(answer.finished),
    )


def stop_reason(finished: Finished, max_tokens: int) -> StopReason:
    """Return Anthropic's stop reason of an answer."""
    match finished.reason:
        case EndReason.LENGTH:
            return "max_tokens" if finished.num_completion_tokens >= max_tokens else "model_context_window_exceeded"
        case EndReason.TOOL_CALLS:
            return "tool_use"
        case EndReason.CONTENT_FILTER:
            return "refusal"
    return "end_turn" if finished.stop is None else "stop_sequence"


def model_info(card: ModelCard) -> ModelInfo:
    """Return a servable name in Anthropic's format."""
    return ModelInfo(
        id=card.name,
        display_name=card.name,
        created_at=datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def model_page(cards: Sequence[ModelCard]) -> ModelPage:
    """Return all servable names in Anthropic's format."""
    infos = [model_info(card) for card in cards]
    return ModelPage(data=infos, first_id=infos[0].id if infos else None, last_id=infos[-1].id if infos else None)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format, which names the offending field only in the message."""
    detail = error.body()["error"]
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = _NO_THREADS if error.param == "thread" else None
    told = MessagesErrorDetail(type=kind, message=detail["message"] or "", details=details)
    return MessagesError(error=told, request_id=request_id).model_dump(mode="json")


class MessageFrames:
    """Writes the events of a streamed message."""

    def __init__(self, head: ResponseHead, *, max_tokens: int, request_id: str) -> None:
        self._head = head
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._reader = BlockReader()

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event of the answer."""
        match item.event:
            case Started() as started:
                opened = MessageObject(
                    id=self._head.response_id, model=self._head.model, content=[], usage=_usage(started, 0, 0)
                )
                return typed_frame("message_start", message=opened.model_dump(mode="json"))
            case TextDelta() as delta:
                return b"".join(map(_step, self._reader.feed(delta)))
            case Finished() as finished:
                closed = b"".join(map(_step, self._reader.close()))
                ending = {"stop_reason": stop_reason(finished, self._max_tokens), "stop_sequence": finished.stop}
                return closed + typed_frame(
                    "message_delta", delta=ending, usage=_whole_usage(finished).model_dump(mode="json")
                )

    def closing(self) -> bytes:
        """Return the event that ends the stream."""
        return typed_frame("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """Return the event of a failure."""
        body = error_body(error, self._request_id)
        return typed_frame(body.pop("type"), **body)


def _step(step: Step) -> bytes:
    block = step.block
    if step.opens:
        return typed_frame("content_block_start", index=block.index, content_block=_content(block, is_open=True))
    if step.closes:
        return typed_frame("content_block_stop", index=block.index)
    kind, field = {
        BlockKind.THOUGHTS: ("thinking_delta", "thinking"),
        BlockKind.TEXT: ("text_delta", "text"),
        BlockKind.CALL: ("input_json_delta", "partial_json"),
    }[block.kind]
    return typed_frame("content_block_delta", index=block.index, delta={"type": kind, field: step.piece})


def _content(block: Block, *, is_open: bool = False) -> dict[str, Any]:
    match block.kind:
        case BlockKind.THOUGHTS:
            return {"type": "thinking", "thinking": "" if is_open else block.text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": "" if is_open else block.text}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block)}


def _input(block: Block) -> dict[str, Any]:
    """Return a call's input; it is empty if the call was cut, or if JSON cannot be written of it.

    The writer supports less depth than the reader, and no lone surrogates. A stream sends what the model wrote.
    """
    found = block.arguments() or {}
    try:
        to_json(found)
    except PydanticSerializationError:
        return {}
    return found


def _whole_usage(finished: Finished) -> MessagesUsage:
    return _usage(finished, finished.num_completion_tokens, finished.num_reasoning_tokens)


def _usage(counted: Started | Finished, num_output: int, num_thinking: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=counted.num_prompt_tokens - counted.num_cached_tokens,
        output_tokens=num_output,
        output_tokens_details=MessagesTokensDetails(thinking_tokens=num_thinking),
        cache_read_input_tokens=counted.num_cached_tokens,
    )
