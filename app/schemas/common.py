"""What the schemas of every resource share: strictness, refusal of what we do not do, and the common values.

Nothing is ignored: a field is either done, or asks for nothing (`NEUTRAL`), or is refused by name.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

ASKS_NOTHING: tuple[object, ...] = (None,)
"""Only null leaves the field unused."""

INT64_MAX = 2**63 - 1


class WireRequest(BaseModel):
    """A JSON object from a client: no coercion, no NaN, no unknown field.

    Attributes:
        NEUTRAL: fields of OpenAI's that we know and do not do, each with the values that ask for nothing. Any other
            value is refused as `unsupported_parameter`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_do_not_do(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name not in cls.NEUTRAL:
                raise _unknown_field(name, [*cls.model_fields, *cls.NEUTRAL])
            elif not any(value == neutral and type(value) is type(neutral) for neutral in cls.NEUTRAL[name]):
                raise PydanticCustomError("unsupported_parameter", "this server does not do it yet", {"field": name})
        return kept


def _unknown_field(name: str, known: list[str]) -> PydanticCustomError:
    near = difflib.get_close_matches(name[:64], known, n=1)
    hint = f". Did you mean '{near[0]}'?" if near else ""
    return PydanticCustomError("unknown_parameter", "{hint}", {"field": name[:64], "hint": hint})


class WireResponse(BaseModel):
    """A JSON object of ours."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class StreamOptions(WireRequest):
    """What a stream carries besides the answer."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with the token counts; the others carry `usage: null`."
    )


class SamplingFields(WireRequest):
    """The fields that chat and text completions share; null means the default everywhere."""

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Mass of the nucleus; default 1.")
    n: int | None = Field(default=None, ge=1, le=128, description="Answers to each prompt; default 1.")
    stop: str | list[str] | None = Field(default=None, description="The text ends before the first of these strings.")
    seed: int | None = Field(
        default=None, ge=-INT64_MAX - 1, le=INT64_MAX, description="Equal seeds and requests draw equal answers."
    )
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Subtracted for each occurrence.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Subtracted once for each token.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, description="Added to the logits of tokens, by token id."
    )
    user: str | None = Field(default=None, max_length=512, description="Accepted, and without effect.")

    top_k: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="Extension: keep the k likeliest tokens; 0 or -1 keeps all."
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Extension: keep tokens at least this fraction as likely as the likeliest.",
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="Extension: divides positive logits of tokens seen; 1 is none."
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Extension: the answer cannot end before this many tokens."
    )
    ignore_eos: bool | None = Field(default=None, description="Extension: go on after the model's end of sequence.")
    stop_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] | None = Field(
        default=None, max_length=64, description="Extension: token ids that end the answer."
    )
    allowed_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] | None = Field(
        default=None, min_length=1, max_length=65536, description="Extension: only these tokens can be drawn."
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, max_length=64, description="Extension: words that the answer never has."
    )
    priority: int | None = Field(
        default=None, ge=-(2**31), le=2**31 - 1, description="Extension: lower is served first; default 0."
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="Extension: prefixes are shared only between equal salts."
    )


class CompletionTokensDetails(WireResponse):
    """Where the tokens of the answer went."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(WireResponse):
    """Where the tokens of the prompt came from."""

    cached_tokens: int = Field(description="Tokens whose KV entries came from the prefix cache.")
    audio_tokens: int = 0


class Usage(WireResponse):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TokenLogprob(WireResponse):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(WireResponse):
    """What the model thought of the tokens of an answer."""

    content: list[ChosenLogprob] | None
    refusal: None = None


WireFinishReason = Literal["stop", "length", "content_filter"]
