"""Translate the answer to a chat into a response, whole or as stream events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from app.http.errors import ApiError
from app.http.sse import typed_frame
from app.responses_api.schemas import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from app.responses_api.tools import CachedSearch, offered_functions
from app.translation.blocks import Block, BlockKind, BlockReader, Step, blocks_of
from app.translation.render import ResponseHead, chat_logprobs
from app.translation.streaming import Answer, ChoiceEvent
from deployments.answer_events import EndReason, Finished, Started, TextDelta, TokenScore

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_ID_PREFIXES = {BlockKind.THOUGHTS: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_GROWING = {
    BlockKind.THOUGHTS: "reasoning_text",
    BlockKind.TEXT: "output_text",
    BlockKind.CALL: "function_call_arguments",
}
_WHY_INCOMPLETE = {EndReason.LENGTH: "max_output_tokens", EndReason.CONTENT_FILTER: "content_filter"}


class ResponseWriter:
    """Writes the response to one request.

    Args:
        head: its id, creation time and model.
        tells_scores: whether to return log-probabilities.
        unix_s: returns the current Unix time in seconds, for `completed_at`.

    Attributes:
        is_kept: whether the response is stored, or will be.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        head: ResponseHead,
        *,
        tells_scores: bool,
        unix_s: Callable[[], int],
        is_kept: bool = False,
    ) -> None:
        self.is_kept = is_kept
        self._completed_s: int | None = None
        self._body = body
        self._head = head
        self._tells_scores = tells_scores
        self._unix_s = unix_s
        offered = offered_functions(body.tools or ())
        self._name_by_called = {
            function.tool.function.name: {"name": function.name, "namespace": function.namespace}
            for function in offered
            if function.namespace is not None
        }

    def whole(self, answer: Answer) -> ResponseObject:
        """Return the response for a complete answer."""
        return self.response(blocks_of(answer), answer.finished)

    def response(
        self, blocks: Sequence[Block], finished: Finished | None, error: dict[str, Any] | None = None
    ) -> ResponseObject:
        """Return the response so far; it is in progress if `finished` and `error` are None."""
        body = self._body
        why = None if finished is None else _WHY_INCOMPLETE.get(finished.reason)
        # A truncated answer is truncated in its last item.
        items = [self.item(block, is_whole=block is not blocks[-1] or _is_whole(block, finished)) for block in blocks]
        if finished is not None and finished.refusal is not None:
            items.append(self.refusal(finished.refusal))
        status: Status = "completed"
        if why or finished is None:
            status = "failed" if error else "incomplete" if why else "in_progress"
        if status == "completed" and self._completed_s is None:
            # Once: what is stored is what the client gets a moment later.
            self._completed_s = self._unix_s()
        return ResponseObject(
            id=self._head.response_id,
            created_at=self._head.created_s,
            completed_at=self._completed_s,
            status=status,
            error=error,
            incomplete_details={"reason": why} if why else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._head.model,
            output=items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            service_tier=body.service_tier if body.service_tier not in (None, "auto") else "default",
            store=self.is_kept,
            temperature=body.temperature,
            text={"format": _plain(None if body.text is None else body.text.format) or {"type": "text"}},
            tool_choice=_plain(body.tool_choice) or "auto",
            tools=[_tool(_plain(tool)) for tool in body.tools or () if not isinstance(tool, CachedSearch)],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            usage=None if finished is None else _usage(finished),
            user=body.user,
            metadata=body.metadata or {},
        )

    def item(self, block: Block, *, is_whole: bool = True, is_open: bool = False) -> dict[str, Any]:
        """Return a block as an output item; an open one is still empty."""
        status = "in_progress" if is_open else "completed" if is_whole else "incomplete"
        item: dict[str, Any] = {"id": self.item_id(block), "status": status}
        match block.kind:
            case BlockKind.THOUGHTS:
                content = [] if is_open else [{"type": "reasoning_text", "text": block.text}]
                return item | {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.TEXT:
                content = [] if is_open else [self.part(block.text, block.scores)]
                return item | {"type": "message", "role": "assistant", "content": content}
        return item | {
            "type": "function_call",
            "call_id": block.call_id,
            **self.name(block),
            "arguments": "" if is_open else block.text,
        }

    def name(self, block: Block) -> dict[str, Any]:
        """Return the client's name for the called function, with its namespace if it has one."""
        return self._name_by_called.get(block.name, {"name": block.name})

    def part(self, text: str, scores: Iterable[TokenScore]) -> dict[str, Any]:
        """Return the only part of a message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(scores)}

    def refusal(self, text: str, *, is_open: bool = False) -> dict[str, Any]:
        """Return the message that refuses the input."""
        return {
            "id": f"msg_{self._head.response_id.partition('_')[2]}r",
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if is_open else "completed",
            "content": [] if is_open else [{"type": "refusal", "refusal": text}],
        }

    def item_id(self, block: Block) -> str:
        """Return the id of a block's item."""
        return f"{_ID_PREFIXES[block.kind]}_{self._head.response_id.partition('_')[2]}{block.index}"

    def logprobs(self, scores: Iterable[TokenScore]) -> list[Any]:
        """Return the log-probabilities in the response's format; empty unless requested."""
        return list(chat_logprobs(scores).content or ()) if self._tells_scores else []


class ResponseFrames:
    """Writes the events of a streamed response, numbered from 0."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._reader = BlockReader()
        self._finished: Finished | None = None
        self._number = 0

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event of the answer."""
        match item.event:
            case Started():
                response = self._response(None)
                return self._frame("response.created", response=response) + self._frame(
                    "response.in_progress", response=response
                )
            case TextDelta() as delta:
                return b"".join(map(self._step, self._reader.feed(delta)))
            case Finished() as finished:
                self._finished = finished
                frames = b"".join(map(self._step, self._reader.close()))
                return frames + (self._refused(finished.refusal) if finished.refusal is not None else b"")

    def response(self) -> ResponseObject:
        """Return the response so far."""
        return self._writer.response(self._reader.blocks, self._finished)

    def closing(self) -> bytes:
        """Return the last event: the whole response."""
        assert self._finished is not None
        kind = "incomplete" if self._finished.reason in _WHY_INCOMPLETE else "completed"
        return self._frame(f"response.{kind}", response=self._response(self._finished))

    def failure(self, error: ApiError) -> bytes:
        """Return the events of a failed response."""
        detail = error.body()["error"]
        blamed = "server_error" if detail["type"] == "server_error" else "invalid_prompt"
        code, message = detail["code"] or blamed, detail["message"]
        failed = self._writer.response(self._reader.blocks, None, {"code": code, "message": message})
        return self._frame("error", code=code, message=message, param=detail["param"]) + self._frame(
            "response.failed", response=failed.model_dump(mode="json")
        )

    def _response(self, finished: Finished | None) -> dict[str, Any]:
        return self._writer.response(self._reader.blocks, finished).model_dump(mode="json")

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.opens:
            item = self._writer.item(block, is_open=True)
            added = self._frame("response.output_item.added", output_index=block.index, item=item)
            return added + self._part(block, "added", "")
        if not step.closes:
            return self._frame(f"response.{_GROWING[block.kind]}.delta", **self._place(block), **self._grown(step))
        is_whole = self._finished is None or _is_whole(block, self._finished)
        return (
            self._frame(f"response.{_GROWING[block.kind]}.done", **self._place(block), **self._whole(block))
            + self._part(block, "done", block.text)
            + self._frame(
                "response.output_item.done",
                output_index=block.index,
                item=self._writer.item(block, is_whole=is_whole),
            )
        )

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"output_index": block.index, "item_id": self._writer.item_id(block)}
        return place if block.kind is BlockKind.CALL else place | {"content_index": 0}

    def _grown(self, step: Step) -> dict[str, Any]:
        is_text = step.block.kind is BlockKind.TEXT
        return {"delta": step.piece} | ({"logprobs": self._writer.logprobs(step.scores)} if is_text else {})

    def _whole(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case BlockKind.THOUGHTS:
                return {"text": block.text}
            case BlockKind.TEXT:
                return {"text": block.text, "logprobs": self._writer.logprobs(block.scores)}
        return {"name": self._writer.name(block)["name"], "arguments": block.text}

    def _part(self, block: Block, what: str, text: str) -> bytes:
        if block.kind is BlockKind.CALL:
            return b""
        part = {"type": "reasoning_text", "text": text}
        if block.kind is BlockKind.TEXT:
            part = self._writer.part(text, block.scores if text else ())
        return self._frame(f"response.content_part.{what}", **self._place(block), part=part)

    def _refused(self, refusal: str) -> bytes:
        index = len(self._reader.blocks)
        item = self._writer.refusal(refusal)
        place = {"output_index": index, "item_id": item["id"], "content_index": 0}
        opened = self._writer.refusal(refusal, is_open=True)
        return (
            self._frame("response.output_item.added", output_index=index, item=opened)
            + self._frame("response.content_part.added", **place, part={"type": "refusal", "refusal": ""})
            + self._frame("response.refusal.delta", **place, delta=refusal)
            + self._frame("response.refusal.done", **place, refusal=refusal)
            + self._frame("response.content_part.done", **place, part=item["content"][0])
            + self._frame("response.output_item.done", output_index=index, item=item)
        )

    def _frame(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return typed_frame(kind, sequence_number=number, **fields)


def _is_whole(last: Block, finished: Finished | None) -> bool:
    """Return whether the last block of an answer is all that it was to be.

    A stop string completes a response, for which the contract has no other word, but not a call that it cuts.
    """
    if finished is None or finished.reason in _WHY_INCOMPLETE:
        return False
    return last.kind is not BlockKind.CALL or finished.reason is EndReason.TOOL_CALLS or last.arguments() is not None


def _usage(finished: Finished) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=finished.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=finished.num_cached_tokens),
        output_tokens=finished.num_completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=finished.num_reasoning_tokens),
        total_tokens=finished.num_prompt_tokens + finished.num_completion_tokens,
    )


def _plain(value: Any) -> Any:
    """Return a parsed value as the client wrote it."""
    return value.model_dump(mode="json", by_alias=True, exclude_none=True) if hasattr(value, "model_dump") else value


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {"description": ""} | dict(tool)
    return {"parameters": None, "strict": False, "description": None} | dict(tool)
