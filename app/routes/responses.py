"""`/v1/responses`: answers to conversations, and those that are kept to be continued. A tenant sees its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.http.errors import ApiError
from app.http.field_names import renamed_fields
from app.http.json_route import JsonResponse, JsonRoute, respond
from app.responses_api.answered import ResponseFrames, ResponseWriter
from app.responses_api.asked import chat_of, field_names
from app.responses_api.kept import Conversations, items_of
from app.responses_api.schemas import (
    DeletedResponse,
    InputItem,
    InputItemList,
    InputTokenCount,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
)
from app.routes.context import ERRORS, Context
from app.translation.streaming import collect
from app.translation.translate import chat_generations
from engine.errors import RequestError

if TYPE_CHECKING:
    from deployments.batches.client import BatchClient

ITEMS_PER_MESSAGE = 4
"""Of an answer: its reasoning, its text, a call or two, which are one message of a chat."""

router = APIRouter(route_class=JsonRoute, tags=["responses"])


def _client(request: Request, context: Context) -> BatchClient | None:
    return context.server.batches if request.app.state.keeps_responses else None


async def _conversations(request: Request, context: Context) -> Conversations:
    max_items = ITEMS_PER_MESSAGE * context.limits.max_messages
    aside = partial(context.aside, is_slow=True)
    return Conversations(_client(request, context), context.tenant, aside=aside, max_items=max_items)


def _after(earlier: Sequence[InputItem], context: Context, *, has_references: bool) -> Context:
    """Return the context of a request that is as large as what it continues or refers to, however small its body."""
    return replace(context, is_large=context.is_large or bool(earlier) or has_references)


async def _kept(request: Request, context: Context) -> BatchClient:
    client = _client(request, context)
    if client is None:
        message = "This server stores no responses: `batches.responses_last_s` is null."
        raise ApiError(404, message, code="responses_not_stored")
    return client


Conversing = Annotated[Conversations, Depends(_conversations)]
Kept = Annotated["BatchClient", Depends(_kept)]
ResponseId = Annotated[str, Path(max_length=128)]


@router.post("/v1/responses", response_model=ResponseObject, responses=ERRORS)
async def create_response(body: ResponsesRequest, context: Context, conversations: Conversing) -> Response:
    """Answer a conversation, whole or as a stream of typed events."""
    head = context.head("resp_", body.model)
    names = field_names(body)
    with renamed_fields(names):
        is_kept = conversations.keeps(body)
        whole, earlier = await conversations.whole(body)
        context = _after(earlier, context, has_references=whole is not body)
        chat = await context.aside(partial(chat_of, whole, earlier))
        translate = partial(chat_generations, chat, context.limits, request_id=context.generation_id(head))
        generations = await context.aside(translate)
        answers = context.generate(generations)
        tells_scores = bool(chat.logprobs)
        writer = ResponseWriter(body, head, tells_scores=tells_scores, unix_s=context.unix_s, is_kept=is_kept)
        if body.stream:
            frames = ResponseFrames(writer)

            async def keep() -> None:
                writer.is_kept = await conversations.keep(whole, frames.response())

            return await context.stream(answers, frames, keep if is_kept else None, names=names)
        (answer,) = await collect(answers)
    if is_kept:
        writer.is_kept = await conversations.keep(whole, writer.whole(answer))
    return await respond(partial(writer.whole, answer), is_large=tells_scores)


@router.post("/v1/responses/input_tokens", response_model=InputTokenCount, responses=ERRORS)
async def count_input_tokens(body: InputTokensRequest, context: Context, conversations: Conversing) -> Response:
    """Count the tokens of an input."""
    with renamed_fields(field_names(body)):
        whole, earlier = await conversations.whole(body)
        context = _after(earlier, context, has_references=whole is not body)
        chat = await context.aside(partial(chat_of, whole, earlier))
        return JsonResponse(InputTokenCount(input_tokens=await context.num_tokens(chat)))


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=ERRORS)
async def retrieve_response(
    response_id: ResponseId, context: Context, kept: Kept, stream: Annotated[bool, Query()] = False
) -> Response:
    """Return a stored response."""
    if stream:
        raise ApiError(400, "'stream' must be false: a stored response is not streamed again.", param="stream")
    found = await kept.response(context.tenant, response_id)
    return Response(found.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=ERRORS)
async def delete_response(response_id: ResponseId, context: Context, kept: Kept) -> Response:
    """Delete a stored response."""
    await kept.forget_response(context.tenant, response_id)
    return JsonResponse(DeletedResponse(id=response_id))


@router.get("/v1/responses/{response_id}/input_items", response_model=InputItemList, responses=ERRORS)
async def list_input_items(
    response_id: ResponseId,
    context: Context,
    kept: Kept,
    after: Annotated[str | None, Query(max_length=128, description="The last id of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the items that a stored response answers, with those of the responses that it continues; newest first.

    Raises:
        RequestError: it is not kept, or one that it continues.
    """
    await kept.response(context.tenant, response_id)
    try:
        conversation = await kept.conversation(context.tenant, response_id)
    except RequestError as error:
        if error.code != "previous_response_not_found":
            raise
        # This request has no field `previous_response_id`.
        raise RequestError(str(error), field="response_id", code="response_not_found") from None
    items = await context.aside(partial(items_of, conversation, with_last_output=False), is_slow=True)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(400, f"There is no '{after}' in the list.", param="after", code="invalid_value")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return JsonResponse(InputItemList.of(page, [item["id"] for item in page], has_more=len(items) > limit))
