"""What the schemas of chat and text completions share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from app.schemas.structured import StructuredOutputs
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse

INT64_MAX = 2**63 - 1
Seed = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
FINGERPRINT = "Of the weights, the adapter and the engine's configuration: equal ones draw equal answers."


class StreamOptions(WireRequest):
    """What a stream carries besides the answer."""

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with the token counts; the others carry `usage: null`."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Extension: with `include_usage`, every chunk carries the counts so far."
    )
    include_obfuscation: bool | None = Field(
        default=None, description="Pad chunks with random characters, so that their sizes tell nothing; default false."
    )


class SamplingExtensions(WireRequest):
    """What vLLM's clients, and ours, may say of how tokens are chosen, whatever the API; null means the default."""

    # Of vLLM, whose clients write out defaults. Spaces between special tokens show in no text without such tokens.
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "include_reasoning": (None, True),
        "include_stop_str_in_output": (None, False),
        "kv_transfer_params": ASKS_NOTHING,
        "logits_processors": (None, []),
        "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False),
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True, False),
        "truncate_prompt_tokens": ASKS_NOTHING,
        "vllm_xargs": (None, {}),
    }

    top_k: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="Extension: keep the k likeliest tokens; 0 or -1 keeps all."
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Extension: keep tokens at least this fraction as likely as the likeliest.",
    )
    top_n_sigma: float | None = Field(
        default=None, ge=0, le=100, description="Extension: keep tokens so many standard deviations below the highest."
    )
    typical_p: float | None = Field(
        default=None, gt=0, le=1, description="Extension: keep this mass of the tokens of the most typical surprise."
    )
    epsilon_cutoff: float | None = Field(
        default=None, ge=0, lt=1, description="Extension: keep tokens at least this probable."
    )
    eta_cutoff: float | None = Field(
        default=None, ge=0, lt=1, description="Extension: the same, with less the flatter the distribution is."
    )
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="Extension: how often the likeliest tokens are left out."
    )
    xtc_threshold: float | None = Field(
        default=None, gt=0, le=0.5, description="Extension: the likeliest are those this probable; default 0.1."
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="Extension: divides positive logits of tokens seen; 1 is none."
    )
    dry_multiplier: float | None = Field(
        default=None, ge=0, le=10, description="Extension: what a token loses that extends a repeat; 0 is none."
    )
    dry_base: float | None = Field(
        default=None, ge=1, le=10, description="Extension: how many times more for each token of it; default 1.75."
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=1, le=1024, description="Extension: shorter repeats cost nothing; default 2."
    )
    dry_sequence_breakers: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        default=None,
        max_length=32,
        description='Extension: no repeat reaches over these strings; default `["\\n", ":", "\\"", "*"]`.',
    )
    dry_penalty_last_n: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="Extension: tokens looked back at; -1, the default, is all."
    )
    lz_penalty: float | None = Field(
        default=None, ge=0, le=2, description="Extension: taken for each bit that repeating the token saves; 0 is none."
    )
    lz_buffer_size: int | None = Field(
        default=None, ge=1, le=512, description="Extension: tokens of the end that are matched at most; default 32."
    )
    lz_lookback_size: int | None = Field(
        default=None, ge=1, le=32768, description="Extension: tokens of the answer they are looked for in; default 512."
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
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="Extension: what the answer has to look like."
    )
    priority: int | None = Field(
        default=None, ge=-(2**31), le=2**31 - 1, description="Extension: lower is served first; default 0."
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="Extension: prefixes are shared only between equal salts."
    )


class SamplingOptions(SamplingExtensions):
    """What chats, text completions and responses alike may say of how tokens are chosen."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy; default: the model's, else 1."
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Mass of the nucleus; default: the model's, else 1."
    )
    stop: str | list[str] | None = Field(default=None, description="The text ends before the first of these strings.")
    seed: Seed | None = Field(default=None, description="Equal seeds and requests draw equal answers.")
    frequency_penalty: Penalty | None = Field(default=None, description="Subtracted for each occurrence.")
    presence_penalty: Penalty | None = Field(default=None, description="Subtracted once for each token.")
    logit_bias: LogitBias | None = Field(default=None, description="Added to the logits of tokens, by token id.")
    user: str | None = Field(default=None, max_length=512, description="Accepted, and without effect.")


class SamplingFields(SamplingOptions):
    """The fields that chat and text completions share; null means the default everywhere."""

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    n: int | None = Field(default=None, ge=1, le=128, description="Answers to each prompt; default 1.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="Extension: tell the log-probabilities of the prompt's tokens, and of so many likeliest ones.",
    )
    use_beam_search: bool | None = Field(
        default=None, description="Extension: the answers are the `n` best that a search with `n` beams finds."
    )
    length_penalty: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="Extension: answers of a search are compared by their log-probability / tokens ^ this; default 1.",
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


class PromptLogprob(WireResponse):
    """What the model thought of a token at a place of the prompt."""

    logprob: float
    rank: int = Field(description="Among all tokens at that place, 1 for the likeliest.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: itself, then the likeliest; null for the first, which follows nothing."""


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(WireResponse):
    """What the model thought of the tokens of an answer."""

    content: list[ChosenLogprob] | None
    refusal: None = None


WireFinishReason = Literal["stop", "length", "content_filter"]
ChatFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]
