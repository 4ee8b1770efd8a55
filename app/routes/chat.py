"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from app.http.json_route import JsonRoute, respond
from app.routes.context import ERRORS, Context
from app.schemas.chat import ChatCompletion, ChatCompletionRequest
from app.translation.chunks import ChatFrames
from app.translation.moderation import chat_classifier
from app.translation.render import chat_completion
from app.translation.streaming import collect
from app.translation.translate import chat_generations

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_completion(body: ChatCompletionRequest, context: Context) -> Response:
    """Answer a conversation, whole or streamed."""
    head = context.head("chatcmpl-", body.model)
    classifier = chat_classifier(body.moderation, context.moderation_model)
    translate = partial(chat_generations, body, context.limits, request_id=context.generation_id(head))
    generations = await context.aside(translate, is_slow=body.structured_outputs is not None)
    answers = context.generate(generations)
    if body.stream:
        return await context.stream(answers, ChatFrames(head, body, classifier=classifier))
    make = partial(chat_completion, head, await collect(answers), body, classifier)
    return await respond(make, is_large=bool(body.logprobs) or body.prompt_logprobs is not None)
