"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from app.http.json_route import JsonResponse, JsonRoute, respond
from app.routes.context import ERRORS, Context
from app.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from app.translation.bounds import check_chars
from app.translation.prompts import tokenized_prompt

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=ERRORS)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """Return the token ids of a text or a conversation."""
    prompt = await context.aside(partial(tokenized_prompt, body, context.limits))
    found = await context.gateway.tokenize(body.model, prompt, with_texts=bool(body.return_token_strs))

    def make() -> TokenizeResponse:
        return TokenizeResponse(
            count=len(found.token_ids),
            max_model_len=found.max_model_len,
            tokens=list(found.token_ids),
            token_strs=None if found.texts is None else list(found.texts),
        )

    return await respond(make, is_large=context.is_large)


@router.post("/detokenize", response_model=DetokenizeResponse, responses=ERRORS)
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    """Return the text of token ids."""
    check_chars(len(body.tokens), context.limits, field="tokens")
    return JsonResponse(DetokenizeResponse(prompt=await context.gateway.detokenize(body.model, body.tokens)))
