"""`POST /v1/messages` and `POST /v1/messages/count_tokens`; errors are told in Anthropic's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from app.errors import is_our_fault, to_api_error
from app.field_errors import invalid_body
from app.field_names import renamed_fields
from app.json_route import JsonResponse, JsonRoute
from app.messages_api.answered import MessageFrames, error_body, message
from app.messages_api.asked import FIELD_NAMES, chat_of
from app.messages_api.schemas import CountRequest, MessageObject, MessagesError, MessagesRequest, TokenCount
from app.routes.context import Context
from app.sse import EventStream
from app.streaming import EventBatches, collect
from app.translate import chat_generations, whole_chat_prompt

_log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": MessagesError, "description": "Any error, in Anthropic's shape."},
    **{status: {"model": MessagesError} for status in (400, 404, 413, 415, 500, 503, 504)},
}


class MessagesRoute(JsonRoute):
    """A route whose errors have Anthropic's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler of a JSON route."""
        handle = super().get_route_handler()

        async def handle_messages(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told in this shape
                if isinstance(error, RequestValidationError):
                    told = invalid_body(error.errors(), error.body)
                else:
                    told = to_api_error(error)
                    if is_our_fault(error):
                        _log.exception("request %s failed", request.state.request_id)
                body = error_body(told, request.state.request_id)
                return JsonResponse(body, status_code=told.status, headers=told.headers)

        return handle_messages


router = APIRouter(route_class=MessagesRoute, tags=["messages"])


@router.post("/v1/messages", response_model=MessageObject, responses=ERRORS)
async def create_message(body: MessagesRequest, context: Context) -> Response:
    """Answer a conversation in Anthropic's shape, at once or as a stream."""
    head = context.head("msg", body.model, joint="_")
    with renamed_fields(FIELD_NAMES):
        (generation,) = chat_generations(chat_of(body), context.limits, request_id=context.generation_id(head))
        # The field is not optional, so that clients have a number of their own that fits no small model.
        answers = [context.generate(replace(generation, clips_max_tokens=True))]
        if body.stream:
            events = await EventBatches(answers).open()
            frames = MessageFrames(head, max_tokens=body.max_tokens)
            return EventStream(events, frames, request_id=context.request_id)
        (answer,) = await collect(answers)
    return JsonResponse(message(head, answer, max_tokens=body.max_tokens))


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(body: CountRequest, context: Context) -> Response:
    """Say how many tokens a prompt has."""
    with renamed_fields(FIELD_NAMES):
        prompt = whole_chat_prompt(chat_of(body), context.limits)
        found = await context.gateway.tokenize(body.model, prompt, with_texts=False)
    return JsonResponse(TokenCount(input_tokens=len(found.token_ids)))
