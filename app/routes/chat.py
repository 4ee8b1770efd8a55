"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.json_route import JsonResponse, JsonRoute
from app.render import chat_completion
from app.routes.context import ERRORS, Context
from app.schemas.chat import ChatCompletion, ChatCompletionRequest
from app.sse import ChatFrames, EventStream
from app.streaming import EventBatches, collect
from app.translate import chat_generation, wants_usage

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_completion(body: ChatCompletionRequest, context: Context) -> Response:
    """Answer a conversation, at once or as a stream."""
    head = context.head("chatcmpl", body.model)
    generation = chat_generation(body, context.limits, request_id=context.generation_id(head))
    answers = [context.gateway.generate(generation)]
    if body.stream:
        events = await EventBatches(answers).open()
        return EventStream(events, ChatFrames(head, include_usage=wants_usage(body)), request_id=context.request_id)
    return JsonResponse(chat_completion(head, (await collect(answers))[0]))
