"""`POST /v1/messages` and `POST /v1/messages/count_tokens`; errors are told in Anthropic's shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from app.http.field_names import renamed_fields
from app.http.json_route import JsonResponse, JsonRoute
from app.messages_api.answered import MessageFrames, message
from app.messages_api.asked import FIELD_NAMES, chat_of
from app.messages_api.schemas import CountRequest, MessageObject, MessagesError, MessagesRequest, TokenCount
from app.routes.context import Context
from app.translation.streaming import collect
from app.translation.translate import chat_generations

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": MessagesError, "description": "Any error, in Anthropic's format."},
    **{status: {"model": MessagesError} for status in (400, 404, 413, 415, 500, 503, 504)},
}

router = APIRouter(route_class=JsonRoute, tags=["messages"])


@router.post("/v1/messages", response_model=MessageObject, responses=ERRORS)
async def create_message(body: MessagesRequest, context: Context) -> Response:
    """Answer a conversation in Anthropic's format, whole or streamed."""
    head = context.head("msg_", body.model)
    with renamed_fields(FIELD_NAMES):
        chat = await context.aside(partial(chat_of, body))
        translate = partial(chat_generations, chat, context.limits, request_id=context.generation_id(head))
        (generation,) = await context.aside(translate)
        # The field is not optional, so that clients have a number of their own that fits no small model.
        answers = context.generate([replace(generation, clips_max_tokens=True)])
        if body.stream:
            frames = MessageFrames(head, max_tokens=body.max_tokens, request_id=context.request_id)
            return await context.stream(answers, frames, names=FIELD_NAMES)
        (answer,) = await collect(answers)
    return JsonResponse(message(head, answer, max_tokens=body.max_tokens))


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(body: CountRequest, context: Context) -> Response:
    """Count the tokens of a prompt."""
    with renamed_fields(FIELD_NAMES):
        chat = await context.aside(partial(chat_of, body))
        return JsonResponse(TokenCount(input_tokens=await context.num_tokens(chat)))
