"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from app.http.json_route import JsonRoute, respond
from app.http.sse import ChatFrames, EventStream
from app.routes.context import ERRORS, Context
from app.schemas.chat import ChatCompletion, ChatCompletionRequest
from app.translation.moderation import chat_classifier
from app.translation.render import ChatShape, chat_completion
from app.translation.streaming import EventBatches, collect
from app.translation.translate import chat_generations, served_tier

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_completion(body: ChatCompletionRequest, context: Context) -> Response:
    """Answer a conversation, whole or streamed."""
    head = context.head("chatcmpl", body.model)
    classifier = chat_classifier(body.moderation, context.moderation_model)
    translate = partial(chat_generations, body, context.limits, request_id=context.generation_id(head))
    generations = await context.aside(translate, is_slow=body.structured_outputs is not None)
    answers = context.generate_all(generations, made_many_by="n")
    shape = ChatShape(
        tells_scores=bool(body.logprobs),
        num_prompt_logprobs=body.prompt_logprobs,
        service_tier=served_tier(body),
        classifier=classifier,
    )
    if body.stream:
        frames = ChatFrames(head, options=body.stream_options, num_choices=len(answers), shape=shape)
        return EventStream(await EventBatches(answers).open(), frames, request_id=context.request_id)
    make = partial(chat_completion, head, await collect(answers), shape)
    return await respond(make, is_large=shape.has_scores)
