"""`POST /v1/completions`, to the letter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from app.schemas.common import (
    FINGERPRINT,
    PROMPT_TOKEN_IDS,
    STOP_REASON,
    TOKEN_IDS,
    PromptLogprobs,
    SamplingFields,
    Usage,
    WireFinishReason,
)
from app.schemas.wire import IfAny, WireResponse

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
        raise PydanticCustomError("invalid", f"must contain only token ids from 0 to {_MAX_TOKEN_ID}")
    return value


# One plain validator: a union would report the failures of all four shapes for each of a hundred thousand items.
WirePrompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(SamplingFields):
    """Ask for the continuation of one or more prompts; each prompt yields `n` choices, in order."""

    prompt: WirePrompt = Field(description="Text or token ids, or an array of either for several continuations.")
    suffix: str | None = Field(
        default=None, description="Text after the answer, which fills in what is between; for models that can do so."
    )
    max_tokens: int | None = Field(
        default=16, ge=0, le=2**31 - 1, description="Maximum tokens of each answer; 0 requires `echo`."
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Return log-probabilities of tokens and of this many top tokens."
    )
    echo: bool | None = Field(default=None, description="Return the prompt before the answer.")
    add_special_tokens: bool | None = Field(
        default=None, description="Extension: begin a text as the tokenizer does, with a special token if it has one."
    )
    best_of: int | None = Field(
        default=None, ge=1, le=128, description="Answers to compute; the `n` most likely ones per token are returned."
    )

    @property
    def num_computed(self) -> int:
        """How many answers are computed per prompt: `best_of`, or else `n`."""
        return self.best_of or self.n or 1


class CompletionLogprobs(WireResponse):
    """Log-probabilities of the tokens of a choice, prompt and answer; all arrays have equal length."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Natural logarithms; null for the first token of a prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Number of whole characters before each token.")


class CompletionChoice(WireResponse):
    """One continuation of a prompt."""

    index: int = Field(description="Position among all choices: `n` for each prompt, in order.")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: WireFinishReason | None
    stop_reason: IfAny[str | int] = Field(default=None, description=STOP_REASON)
    prompt_logprobs: IfAny[PromptLogprobs] = Field(default=None, description="Extension: present if requested.")
    prompt_token_ids: IfAny[list[int]] = Field(default=None, description=PROMPT_TOKEN_IDS)
    token_ids: IfAny[list[int]] = Field(default=None, description=TOKEN_IDS)


class Completion(WireResponse):
    """All continuations; also a chunk of a stream, which ends with `data: [DONE]`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: IfAny[str] = Field(default=None, description=FINGERPRINT)
    obfuscation: IfAny[str] = Field(default=None, description="In a stream, if requested.")
