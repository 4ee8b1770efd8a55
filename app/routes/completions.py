"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from app.http.json_route import JsonRoute, respond
from app.routes.context import ERRORS, Context
from app.schemas.completions import Completion, CompletionRequest
from app.translation.chunks import CompletionFrames
from app.translation.render import completion
from app.translation.streaming import collect
from app.translation.translate import text_generations

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post("/v1/completions", response_model=Completion, responses=ERRORS)
async def create_completion(body: CompletionRequest, context: Context) -> Response:
    """Continue one or more prompts, whole or streamed."""
    head = context.head("cmpl-", body.model)
    translate = partial(text_generations, body, context.limits, request_id=context.generation_id(head))
    generations = await context.aside(translate, is_slow=body.structured_outputs is not None)
    answers = context.generate(generations, made_many_by="n" if body.num_computed > 1 else "prompt")
    if body.stream:
        return await context.stream(answers, CompletionFrames(head, body))
    make = partial(completion, head, await collect(answers), body)
    return await respond(make, is_large=body.logprobs is not None or body.prompt_logprobs is not None)
