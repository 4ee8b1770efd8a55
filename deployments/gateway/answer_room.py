"""How many tokens an answer may have after its prompt in a model's context. Pure."""

from __future__ import annotations

from deployments.generation import GenerationRequest
from engine.errors import RequestError


def answer_room(request: GenerationRequest, num_prompt: int, limit: int, *, field: str) -> int:
    """Return how many tokens the answer may have.

    Args:
        limit: the model's context length in tokens.
        field: the request field that holds the prompt.

    Raises:
        RequestError: the prompt alone, or prompt and answer together, exceed the context.
    """
    asked = request.max_tokens
    if asked is not None and request.clips_max_tokens:
        if num_prompt >= limit:
            # Coding agents recognize this wording of Anthropic's and compact the conversation.
            raise _too_long(
                f"'{field}': prompt is too long: {num_prompt} tokens > {limit - 1} maximum. This model's maximum "
                f"context length is {limit} tokens, of the prompt and the completion together.",
                field,
            )
        asked = min(asked, limit - num_prompt)
    if num_prompt < limit <= (asked or 1):
        name = request.max_tokens_field
        raise _too_long(
            f"'{name}' is {asked}, but this model's maximum context length is {limit} tokens, of the prompt and "
            "the completion together.",
            name,
        )
    if num_prompt + (asked or 1) > limit:
        raise _too_long(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt + (asked or 1)} tokens ({num_prompt} in '{field}', {asked or 1} in the completion).",
            field,
        )
    return asked or limit - num_prompt


def _too_long(message: str, field: str) -> RequestError:
    return RequestError(message, field=field, code="context_length_exceeded")
