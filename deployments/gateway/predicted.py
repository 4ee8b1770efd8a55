"""Tokenize a client's predicted output, which the engine may use as draft tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from deployments.gateway.served_model import ServedModel, check_vocabulary
from deployments.generation import PREDICTION_FIELD, TextPrompt
from engine.errors import RequestError


async def prediction_ids(model: ServedModel, text: str, flow: Hashable) -> Sequence[int]:
    """Return the token ids of a prediction; empty for an empty text.

    Raises:
        RequestError: it is longer than the context, or cannot be encoded for this model.
        UnavailableError: the tokenizer cannot be reached.
    """
    if not text:
        return ()
    field = PREDICTION_FIELD
    try:
        token_ids = await model.encode_patiently(TextPrompt(text=text, has_special_tokens=False), flow)
    except RequestError as error:
        raise RequestError(f"'{field}' is refused: {error.message}", field=field) from None
    check_vocabulary(token_ids, model.config.vocab_size, field=field)
    limit = model.config.max_model_len
    if len(token_ids) > limit:
        raise RequestError(
            f"'{field}' has {len(token_ids)} tokens, but this model's maximum context length is {limit} tokens.",
            field=field,
        )
    return token_ids
