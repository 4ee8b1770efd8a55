"""`POST /v1/completions`, to the letter."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from app.schemas.common import ASKS_NOTHING, SamplingFields, Usage, WireFinishReason, WireResponse

_MAX_TOKEN_ID = 2**31 - 1
_SHAPES = "must be a string, an array of strings, an array of token ids, or an array of arrays of token ids"


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", _SHAPES)
    if not value:
        raise PydanticCustomError("invalid", "must not be empty")
    if all(isinstance(item, str) for item in value):
        return value
    rows = [value] if _is_token_ids(value) else value
    if not all(_is_token_ids(row) for row in rows):
        raise PydanticCustomError("invalid_type", _SHAPES)
    if not all(rows):
        raise PydanticCustomError("invalid", "must not contain an empty array of token ids")
    if any(min(row) < 0 or max(row) > _MAX_TOKEN_ID for row in rows):
        raise PydanticCustomError("invalid", f"token ids must be from 0 to {_MAX_TOKEN_ID}")
    return value


# One plain validator: a union would report the failures of all four shapes for each of a hundred thousand items.
WirePrompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(SamplingFields):
    """Ask for the continuation of one or several prompts; each prompt becomes one choice, in order.

    Known fields that are not done yet (`logprobs`, `echo`, `suffix`, `best_of`, ...) are refused unless they ask for
    nothing.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "best_of": (None, 1),
        "echo": (None, False),
        "logit_bias": (None, {}),
        "logprobs": ASKS_NOTHING,
        "suffix": (None, ""),
    }

    prompt: WirePrompt = Field(description="Text or token ids; an array of either asks for several continuations.")
    max_tokens: int | None = Field(default=16, ge=1, le=2**31 - 1, description="Tokens of each answer at most.")


class CompletionChoice(WireResponse):
    """The continuation of one prompt."""

    index: int = Field(description="Place of the prompt in the request.")
    text: str
    logprobs: None = None
    finish_reason: WireFinishReason | None


class Completion(WireResponse):
    """All continuations; also the shape of a chunk of a stream, which ends with `data: [DONE]`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
