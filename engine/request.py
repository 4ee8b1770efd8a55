"""The engine's input and output: plain values, token ids only, no text.

A `Request` goes in once. `Emission`s come out, at most one per step and request, until one has a finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from adapters.identity import AdapterDigest

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a request ended. The stream handler implements stop strings: it cancels the request whose text it cut."""

    STOP = "stop"
    """An end-of-sequence or stop token was drawn; it is the last token of the emission."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    CANCELLED = "cancelled"
    """The request was cancelled: the client disconnected, or the stream handler found a stop string."""
    FAILED = "failed"
    """The request failed (NaN logits, a broken adapter, the end of the engine); `Emission.error` says how."""
    EXPIRED = "expired"
    """Its deadline passed, or would pass before the answer is complete; `Emission.error` says which."""
    UNFOLLOWABLE = "unfollowable"
    """Its grammar cannot be followed, or exceeded its limits on the way; `Emission.error` says why."""
    UNAVAILABLE = "unavailable"
    """Something it needs (an adapter's files) is temporarily unavailable; `Emission.error` says what."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer is as long as it was to be; that of a cancelled request mostly has a stop string."""
        return self in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


class Pooling(StrEnum):
    """How a request's hidden states after the final norm are pooled into one vector."""

    LAST = "last"
    """The hidden state of the last token, which attends to all others."""
    MEAN = "mean"
    """Their mean. Every token is computed, even if it is cached."""
    CLASS = "class"
    """The scores that the adapter's classifier gives the last token's: a vector of one number for each label."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural logarithm) of one position, before penalties, masks and temperature.

    Attributes:
        logprob: of the token.
        top: (token id, logprob) of the likeliest tokens, likeliest first; ties by ascending id.
        rank: rank of the token among all, 1 for the likeliest; ties share a rank.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DryPenalty:
    """The DRY penalty, for tokens that would extend a repeat (`engine.sampling.repeats.DryRow`).

    Attributes:
        multiplier: penalty on the logit of a token that extends a repeat of `allowed_length` tokens.
        base: factor on the penalty for each further token of the repeat.
        last_n: number of most recent tokens to search; -1 for all.
        breakers: sequences of token ids across which no repeat extends.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LzPenalty:
    """The LZ penalty, for tokens that compress well (`engine.sampling.repeats.LzRow`).

    Attributes:
        strength: penalty per bit saved.
        buffer: maximum number of tokens at the output's end to match.
        lookback: number of output tokens to search for them, at least one.
    """

    strength: float
    buffer: int = 32
    lookback: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. Bounds are checked above the engine; defaults sample the unmodified distribution.

    Attributes:
        max_tokens: maximum number of tokens to generate, including `Request.prior_output_ids`.
        min_tokens: end-of-sequence and stop tokens cannot be drawn before this many.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set with this probability mass (1 keeps all).
        min_p: keep tokens at least this fraction as likely as the likeliest (0 keeps all).
        top_n_sigma: keep tokens at most this many standard deviations of the logits below the highest (0 keeps all).
        typical_p: keep the tokens with the most typical surprisal, up to this probability mass (1 keeps all).
        epsilon_cutoff: keep tokens at least this probable (0 keeps all).
        eta_cutoff: the same with a threshold that is lower for flatter distributions (0 keeps all).
        xtc_probability: how often all tokens at least `xtc_threshold` probable except the least likely are removed.
        seed: a draw is a function of (seed, position) only. The gateway draws a seed if the client gives none.
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens in prompt or output; 1 is none.
        frequency_penalty: subtracted once for each occurrence in the output.
        presence_penalty: subtracted once for each distinct token of the output.
        dry: penalty on tokens that would extend a repeat in prompt or output; None for none.
        lz: penalty on tokens that would repeat the output; None for none.
        stop_token_ids: drawing one of these ends the request, in addition to the model's end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end the request.
        logit_bias: (token id, value added to its logit), applied before everything else.
        allowed_token_ids: only these can be drawn; empty allows all.
        bad_words: sequences of token ids that never occur in the output.
        grammar: constrains the output, in llguidance's grammar format; the output can end only where the grammar can.
        num_logprobs: log-probabilities of each output token and of this many likeliest tokens; None for none.
        num_prompt_logprobs: the same for the prompt, from its second token on. Such a prompt is computed completely,
            even if it is cached.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry: DryPenalty | None = None
    lz: LzPenalty | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether there are penalties that depend on the previous tokens, but not on their order."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def can_jump(self) -> bool:
        """Whether tokens that the grammar forces are emitted without sampling: no option needs each token's logits."""
        asks_each = self.num_logprobs is not None or bool(self.min_tokens or self.allowed_token_ids or self.bad_words)
        return self.grammar is not None and not (asks_each or self.ignore_eos)

    @property
    def is_followed(self) -> bool:
        """Whether the host must know each token before the next is sampled, as masks or penalties depend on it."""
        has_longer = any(len(word) > 1 for word in self.bad_words)
        return self.grammar is not None or has_longer or self.dry is not None or self.lz is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation, or one vector, as the scheduler sees it.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        prior_output_ids: tokens of this generation that another replica already produced; they count as output for
            penalties, `min_tokens`, `max_tokens` and the positions of seeded draws, and are not emitted again.
        adapter: digest of the LoRA adapter to apply, None for the base model.
        adapter_start: position of the first token that it applies to; the base model computes those before it, and
            they share the base model's prefix cache (activated LoRA, arXiv 2504.12397).
        tenant: the tenant whose fair share the request uses.
        salt: isolates the prefix cache: two requests share blocks only if their salts are equal.
        retention_s: for this long, its prefix cache blocks are evicted after others; at most half of all are retained.
        priority: lower is served first; within a priority, tenants and adapters get fair shares.
        deadline_s: monotonic time (`time.monotonic`) after which nobody waits for the answer; None for never.
        pooling: return a vector pooled from the prompt's hidden states instead of tokens; `params` are then ignored.
        prediction_ids: most of the expected answer, used for drafts: the answer is the same but may come sooner.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prior_output_ids: tuple[int, ...] = ()
    adapter: AdapterDigest | None = None
    adapter_start: int = 0
    tenant: str = ""
    salt: str = ""
    retention_s: float = 0.0
    priority: int = 0
    deadline_s: float | None = None
    pooling: Pooling | None = None
    prediction_ids: tuple[int, ...] = ()

    @property
    def num_given(self) -> int:
        """Tokens that it comes with: prompt and prior output."""
        return len(self.prompt_ids) + len(self.prior_output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """The output of one step for one request.

    Attributes:
        token_ids: new tokens in order; empty only if `finish_reason` is set, or on the way to a gateway to claim it.
        finish_reason: set on the last emission of a request.
        num_cached_tokens: prompt tokens that came from the prefix cache; valid from the first emission on.
        num_accepted, num_rejected: draft tokens taken from the prediction so far that were accepted, and rejected.
        logprobs: one per token in `token_ids`, if requested.
        prompt_logprobs: one per prompt token except the first, if requested; sent with the request's first token.
        pooled: the vector, or the scores, of a pooling request: float32, little-endian. Sent with STOP.
        error: one sentence for the client if `finish_reason` is FAILED, UNAVAILABLE, UNFOLLOWABLE or EXPIRED.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes | None = None
    error: str | None = None
