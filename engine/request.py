"""What enters the engine and what leaves it: plain values, token ids only, no text.

A `Request` goes in once. `Emission`s come out, at most one a step for each request, until one carries a finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from adapters.identity import AdapterDigest

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a request ended. Stop strings are the stream handler's business: it cancels the request it has cut."""

    STOP = "stop"
    """An end-of-sequence or stop token id was drawn; that token is the last of the emission."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    CANCELLED = "cancelled"
    """Someone asked for the end: the client left, or the stream handler saw a stop string."""
    FAILED = "failed"
    """This request alone failed inside a step (NaN logits, a broken adapter); `Emission.error` says how."""
    UNAVAILABLE = "unavailable"
    """What it needs cannot be had now, and may be soon (an adapter's files); `Emission.error` says what."""
    UNFOLLOWABLE = "unfollowable"
    """Its grammar cannot be followed, or took too much on the way; `Emission.error` says why."""
    EXPIRED = "expired"
    """Its deadline passed, or would have before its answer was whole; `Emission.error` says which."""


class Pooling(StrEnum):
    """What one vector is made of: a request's hidden states after the final norm."""

    LAST = "last"
    """That of the last token, which has seen all others."""
    MEAN = "mean"
    """Their mean. Every token is computed, cached or not."""


class TokenLogprobs(NamedTuple):
    """What the model itself thought of one token: natural logarithms, before penalties, masks and temperature.

    Attributes:
        logprob: of the token.
        top: (token id, logprob) of the likeliest tokens, likeliest first; equal ones by ascending id.
        rank: of the token among all, 1 for the likeliest; equal ones have one rank.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DryPenalty:
    """What DRY takes from tokens that would extend a repeat (`engine.sampling.repeats.DryRow`).

    Attributes:
        multiplier: what a token loses that extends a repeat of `allowed_length` tokens.
        base: how many times more for each further token of the repeat.
        last_n: how many of the last tokens are looked at; -1 for all.
        breakers: sequences of token ids over which no repeat reaches.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LzPenalty:
    """What the LZ penalty takes from tokens that compress well (`engine.sampling.repeats.LzRow`).

    Attributes:
        strength: taken for each bit that is saved.
        buffer: tokens of the output's end that are matched at most.
        lookback: tokens of the output in which they are looked for, at least one.
    """

    strength: float
    buffer: int = 32
    lookback: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. All bounds are checked above the engine; defaults draw from the plain distribution.

    Attributes:
        max_tokens: tokens to generate at most, those of `Request.prior_output_ids` included.
        min_tokens: end-of-sequence and stop tokens cannot be drawn before this many.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set with this probability mass (1 keeps all).
        min_p: keep tokens at least this fraction as likely as the likeliest (0 keeps all).
        top_n_sigma: keep tokens at most this many standard deviations of the logits below the highest (0 keeps all).
        typical_p: keep the tokens of the most typical surprise with this probability mass (1 keeps all).
        epsilon_cutoff: keep tokens at least this probable (0 keeps all).
        eta_cutoff: the same, with a bound that falls as the distribution is flatter (0 keeps all).
        xtc_probability: how often the likeliest tokens are left out in favour of the last one over `xtc_threshold`.
        seed: a draw is a function of (seed, position) only. None: the gateway has drawn one; the engine sees an int.
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens in prompt or output; 1 is none.
        frequency_penalty: subtracted once for each occurrence in the output.
        presence_penalty: subtracted once for each distinct token of the output.
        dry: what tokens lose that would extend a repeat in prompt or output; None for nothing.
        lz: what tokens lose that would repeat the output; None for nothing.
        stop_token_ids: drawing one of these ends the request, besides the model's own end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end the request.
        logit_bias: (token id, what is added to its logit), before everything else.
        allowed_token_ids: only these can be drawn; empty allows all.
        bad_words: sequences of token ids that the output never has.
        grammar: what the output follows, as llguidance writes grammars; it can end only where the grammar can.
        num_logprobs: log-probabilities of each token of the output and of so many likeliest ones; None for none.
        num_prompt_logprobs: the same of the prompt, from its second token on. Such a prompt is computed as a whole,
            cached or not.
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
        """Whether tokens that were seen weigh on the next one, whatever their order."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def can_jump(self) -> bool:
        """Whether tokens that the grammar leaves no choice of are taken undrawn: nothing is asked of each of them."""
        asks_each = self.num_logprobs is not None or bool(self.min_tokens or self.allowed_token_ids or self.bad_words)
        return self.grammar is not None and not (asks_each or self.ignore_eos)

    @property
    def is_followed(self) -> bool:
        """Whether what may come next depends on the tokens so far by more than the model: the host must know them."""
        return self.grammar is not None or bool(self.bad_words) or self.dry is not None or self.lz is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation, or one vector, as the scheduler sees it.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        prior_output_ids: tokens of this same generation that another replica already produced; they count as output
            for penalties, `min_tokens`, `max_tokens` and the positions of seeded draws, and are not emitted again.
        adapter: digest of the LoRA adapter to apply, None for the base model.
        tenant: whose share of the engine it takes.
        salt: isolation of the prefix cache: two requests share blocks only if their salts are equal.
        retention_s: so long its blocks in the prefix cache are overwritten after others, as far as there are others.
        priority: lower is served first; of equal priorities each tenant and adapter gets its fair share.
        deadline_s: monotonic time (`time.monotonic`) after which nobody waits for the answer; None for never.
        pooling: asks for the prompt's hidden states, made one vector, instead of tokens; `params` mean nothing then.
        prediction_ids: what the answer is expected to be, but for some places: it may come sooner, and is the same.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prior_output_ids: tuple[int, ...] = ()
    adapter: AdapterDigest | None = None
    tenant: str = ""
    salt: str = ""
    retention_s: float = 0.0
    priority: int = 0
    deadline_s: float | None = None
    pooling: Pooling | None = None
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one step brought one request.

    Attributes:
        token_ids: new tokens in order; empty only where `finish_reason` is set.
        finish_reason: set on the last emission of a request.
        num_cached_tokens: prompt tokens that came from the prefix cache; truthful from the first emission on.
        num_accepted, num_rejected: tokens of the prediction so far that the answer took, and that were computed in
            vain.
        logprobs: one for each of `token_ids`, where they are asked for.
        prompt_logprobs: one for each token of the prompt but the first, where they are asked for; they come with the
            request's first token.
        pooled: the vector that was asked for instead of tokens: float32, little-endian. It comes with STOP.
        error: one sentence for the client where `finish_reason` is FAILED, UNAVAILABLE, UNFOLLOWABLE or EXPIRED.
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
