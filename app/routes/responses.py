"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from app.http.field_names import renamed_fields
from app.http.json_route import JsonResponse, JsonRoute, respond
from app.http.sse import EventStream
from app.responses_api.answered import ResponseFrames, ResponseWriter
from app.responses_api.asked import chat_of, field_names
from app.responses_api.schemas import InputTokenCount, InputTokensRequest, ResponseObject, ResponsesRequest
from app.routes.context import ERRORS, Context
from app.translation.streaming import EventBatches, collect
from app.translation.translate import chat_generations

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post("/v1/responses", response_model=ResponseObject, responses=ERRORS)
async def create_response(body: ResponsesRequest, context: Context) -> Response:
    """Answer a conversation, whole or as a stream of typed events; nothing is stored."""
    head = context.head("resp", body.model, joint="_")
    names = field_names(body)
    with renamed_fields(names):
        chat = await context.aside(partial(chat_of, body))
        translate = partial(chat_generations, chat, context.limits, request_id=context.generation_id(head))
        generations = await context.aside(translate)
        answers = [context.generate(generation) for generation in generations]
        writer = ResponseWriter(body, head, tells_scores=bool(chat.logprobs), unix_s=context.unix_s)
        if body.stream:
            events = await EventBatches(answers).open()
            return EventStream(events, ResponseFrames(writer), request_id=context.request_id, names=names)
        (answer,) = await collect(answers)
    return await respond(partial(writer.whole, answer), is_large=bool(chat.logprobs))


@router.post("/v1/responses/input_tokens", response_model=InputTokenCount, responses=ERRORS)
async def count_input_tokens(body: InputTokensRequest, context: Context) -> Response:
    """Count the tokens of an input."""
    with renamed_fields(field_names(body)):
        chat = await context.aside(partial(chat_of, body))
        return JsonResponse(InputTokenCount(input_tokens=await context.num_tokens(chat)))
