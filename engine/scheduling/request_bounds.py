"""Checks before a request is queued whether this engine can ever serve it. Pure."""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.errors import RequestError
from engine.request import Pooling, Request


def check_request(request: Request, config: ResolvedConfig) -> None:
    """Check that a request can be served.

    Raises:
        RequestError: it can never be served.
    """
    limit, known_ids = config.max_model_len, (*request.prompt_ids, *request.prior_output_ids)
    num_prompt, num_prior, num_known = len(request.prompt_ids), len(request.prior_output_ids), len(known_ids)
    if not num_prompt:
        raise RequestError("The prompt is empty; at least 1 token is needed.", field="prompt")
    is_pooled = request.pooling is not None
    if not is_pooled and not config.generates:
        raise RequestError(
            "This is an embedding model: it has no output matrix and cannot generate text.", field="model"
        )
    if request.pooling is Pooling.CLASS and request.adapter is None:
        raise RequestError("A base model has no classifier; an adapter that brings one is needed.", field="model")
    if is_pooled and num_known > limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens, but the input has {num_known} tokens.",
            field="input",
            code="context_length_exceeded",
        )
    if not is_pooled and num_known >= limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens, but the prompt has {num_known} tokens, which "
            "leaves no room for an answer.",
            field="messages",
            code="context_length_exceeded",
        )
    last_id = (config.vocab_size or 1 << 31) - 1
    for field, ids in (("prompt", known_ids), ("prediction", request.prediction_ids)):
        if ids and (min(ids) < 0 or max(ids) > last_id):
            wrong = next(i for i in ids if not 0 <= i <= last_id)
            raise RequestError(f"Token id {wrong} is outside the vocabulary, 0 to {last_id}.", field=field)
    if not is_pooled and request.params.max_tokens <= num_prior:
        raise RequestError(
            f"max_tokens is {request.params.max_tokens}; at least {num_prior + 1} is needed.", field="max_tokens"
        )
    longest = min(limit, num_prompt + request.params.max_tokens)
    capacity = config.reach.capacity(config.num_blocks, limit)
    if longest > capacity:
        raise RequestError(
            f"Prompt and answer may take {longest} tokens, but the cache of this server holds {capacity}.",
            field="max_tokens",
            code="context_length_exceeded",
        )
