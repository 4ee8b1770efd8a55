"""What the schemas of chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError
from typing_extensions import TypedDict  # Pydantic does not take that of Python 3.11's own.

from app.schemas.structured import ResponseFormat, StructuredOutputs
from app.schemas.wire import ASKS_NOTHING, ModelName, TokenId, WireRequest, WireResponse

INT64_MAX = 2**63 - 1
Seed = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MAX_LOGIT_BIAS = 65_536
"""More are not looked at one by one, as all of them may be wrong."""


def _not_too_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticKnownError(
            "too_long", {"field_type": "Dictionary", "max_length": MAX_LOGIT_BIAS, "actual_length": len(value)}
        )
    return value


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_too_many)]
FINGERPRINT = "Covers weights, adapter and engine configuration; if equal, equal requests and seeds get equal answers."


class StreamOptions(WireRequest):
    """What a stream contains besides the answer."""

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk with the token counts; all others have `usage: null`."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Extension: with `include_usage`, every chunk has the counts so far."
    )
    include_obfuscation: bool | None = Field(
        default=None, description="Pad chunks with random characters so that sizes reveal nothing; default: false."
    )


class SamplingOptions(WireRequest):
    """Sampling options of chats, text completions and responses, with vLLM's extensions and ours; null: the default."""

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
        default=None, ge=-1, le=2**31 - 1, description="Extension: keep the k most likely tokens; 0 or -1 keeps all."
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Extension: keep tokens at least this fraction as likely as the most likely one.",
    )
    top_n_sigma: float | None = Field(
        default=None, ge=0, le=100, description="Extension: keep logits within this many sigmas of the highest."
    )
    typical_p: float | None = Field(
        default=None, gt=0, le=1, description="Extension: keep the tokens of most typical surprisal, up to this mass."
    )
    epsilon_cutoff: float | None = Field(
        default=None, ge=0, lt=1, description="Extension: keep tokens with at least this probability."
    )
    eta_cutoff: float | None = Field(
        default=None, ge=0, lt=1, description="Extension: like `epsilon_cutoff`, but lower for flatter distributions."
    )
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="Extension: how often XTC excludes the most likely tokens."
    )
    xtc_threshold: float | None = Field(
        default=None, gt=0, le=0.5, description="Extension: XTC applies to tokens at least this probable; default: 0.1."
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="Extension: divides positive logits of tokens seen; 1 disables it."
    )
    dry_multiplier: float | None = Field(
        default=None, ge=0, le=10, description="Extension: DRY penalty of a token that extends a repeat; 0: none."
    )
    dry_base: float | None = Field(
        default=None, ge=1, le=10, description="Extension: DRY penalty factor per further token; defaults to 1.75."
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=1, le=1024, description="Extension: DRY ignores shorter repeats; defaults to 2."
    )
    dry_sequence_breakers: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        default=None,
        max_length=32,
        description='Extension: DRY repeats never cross these strings; defaults to `["\\n", ":", "\\"", "*"]`.',
    )
    dry_penalty_last_n: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="Extension: last tokens that DRY searches; -1 (default): all."
    )
    lz_penalty: float | None = Field(
        default=None, ge=0, le=2, description="Extension: LZ penalty per bit that a repeated token saves; 0: none."
    )
    lz_buffer_size: int | None = Field(
        default=None, ge=1, le=512, description="Extension: maximum length of an LZ match in tokens; defaults to 32."
    )
    lz_lookback_size: int | None = Field(
        default=None, ge=1, le=32768, description="Extension: last answer tokens that LZ searches; defaults to 512."
    )
    min_tokens: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Extension: minimum number of tokens of the answer; `stop` strings that end in them are ignored.",
    )
    ignore_eos: bool | None = Field(default=None, description="Extension: continue after an end-of-sequence token.")
    stop_token_ids: list[TokenId] | None = Field(
        default=None, max_length=64, description="Extension: token ids that end the answer."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        default=None, min_length=1, max_length=65536, description="Extension: only these tokens can be generated."
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, max_length=64, description="Extension: words, of whole tokens, that never appear in the answer."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="Extension: format that the answer must have."
    )
    priority: int | None = Field(
        default=None, ge=-(2**31), le=2**31 - 1, description="Extension: lower is served first; defaults to 0."
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="Extension: prefixes are shared only between equal salts."
    )

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy; defaults to the model's value, else 1."
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Probability mass of the nucleus; defaults to the model's value, else 1."
    )
    stop: str | list[str] | None = Field(default=None, description="The text ends before the first of these strings.")
    seed: Seed | None = Field(default=None, description="Equal requests with equal seeds get equal answers.")
    frequency_penalty: Penalty | None = Field(default=None, description="Subtracted for each occurrence in the answer.")
    presence_penalty: Penalty | None = Field(default=None, description="Subtracted once for each token in the answer.")
    logit_bias: LogitBias | None = Field(default=None, description="Added to the logits of tokens, by token id.")
    user: str | None = Field(default=None, max_length=512, description="Accepted, no effect.")


class SamplingFields(SamplingOptions):
    """Fields that chats and text completions share; null always means the default."""

    model: ModelName
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    n: int | None = Field(default=None, ge=1, le=128, description="Answers per prompt; defaults to 1.")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="Extension: return log-probabilities of the prompt's tokens and of this many top tokens.",
    )
    response_format: ResponseFormat | None = Field(default=None, description="Format that the answer must have.")
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Extension: the text ends after the `stop` string, or the text of the stop token."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Extension: false to show special tokens in the text; defaults to true."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Extension: also return the token ids of the prompt and of the answers."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Extension: log-probabilities name tokens by id, as `token_id:ID`, not by text."
    )
    use_beam_search: bool | None = Field(
        default=None, description="Extension: return the best `n` answers that a search with `n` beams finds."
    )
    length_penalty: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="Extension: beam search ranks answers by log-probability / tokens ^ this; defaults to 1.",
    )


TOKEN_IDS = "Extension: present if requested; in a stream, those of the tokens whose text ends in the chunk."
PROMPT_TOKEN_IDS = "Extension: present if requested; in a stream, in the first chunk."


class CompletionTokensDetails(WireResponse):
    """Breakdown of the tokens of the answer."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(WireResponse):
    """Breakdown of the tokens of the prompt."""

    cached_tokens: int = Field(description="Tokens whose KV entries came from the prefix cache.")
    audio_tokens: int = 0


class Usage(WireResponse):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TokenLogprob(TypedDict):
    """A token and the natural logarithm of its probability. A dictionary, as one answer may have a million."""

    token: str
    logprob: float
    bytes: list[int] | None


class PromptLogprob(TypedDict):
    """Log-probability and rank of a token of the prompt."""

    logprob: float
    rank: Annotated[int, Field(description="Among all tokens at that position; 1 is the most likely.")]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: itself, then the likeliest; null for the first, which follows nothing."""


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(WireResponse):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChosenLogprob] | None
    refusal: None = None


STOP_REASON = "Extension: the stop string or token id of the request that ended the answer, if one did."
WireFinishReason = Literal["stop", "length", "content_filter"]
ChatFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]
