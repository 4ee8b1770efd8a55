"""Translate a validated request to `GenerationRequest`s, and check the limits of the settings.

Pure, except that requests without a seed get one. Every failure is a `RequestError`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.makers_defaults import READ
from app.schemas.chat import ChatCompletionRequest, joined_text
from app.schemas.common import SamplingFields
from app.schemas.completions import CompletionRequest
from app.settings import LimitSettings
from app.translation.beams import with_beams
from app.translation.bounds import check_chars, check_count
from app.translation.moderation import moderation_asked
from app.translation.prompts import chat_prompt, text_prompts
from app.translation.structure import answer_grammar
from app.translation.tool_use import tool_use
from deployments.generation import PREDICTION_FIELD, GenerationRequest, Prompt
from deployments.siblings import Siblings
from engine.errors import RequestError
from engine.request import DryPenalty, LzPenalty, SamplingParams

DRY_BREAKERS = ("\n", ":", '"', "*")
"""Strings at which repeats usually end: the default of other DRY implementations."""
_SEED_MASK = 2**64 - 1
_PRIORITY_BY_TIER = {"priority": -8, "flex": 8}
"""Half of the maximum head start or delay (`engine.scheduling.live_request`)."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""The golden-ratio increment of splitmix64: odd, and far from any seed that people choose."""

_AS_THEY_ARE = (
    *("min_tokens", "temperature", "top_p", "min_p", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("xtc_probability", "xtc_threshold", "repetition_penalty", "frequency_penalty", "presence_penalty"),
)
"""Fields that have the same name and meaning as sampling parameters."""


def chat_generations(
    body: ChatCompletionRequest, limits: LimitSettings, *, request_id: str
) -> tuple[GenerationRequest, ...]:
    """Return one request per choice of a chat completion."""
    prompt = chat_prompt(body, limits)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError.about("max_tokens", "is the older name of 'max_completion_tokens'; set one of them.")
    if body.top_logprobs and not body.logprobs:
        raise RequestError.about("top_logprobs", "needs 'logprobs' to be true.")
    base = _generation(body, prompt, limits, body.max_completion_tokens or body.max_tokens)
    if body.priority is not None and body.served_tier not in (None, "default"):
        raise RequestError("Set 'service_tier' or 'priority', not both.", field="service_tier")
    base = replace(
        base,
        params=replace(base.params, num_logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        grammar=answer_grammar(body, limits),
        tool_use=tool_use(body, prompt.tools),
        moderation=moderation_asked(body.moderation),
        prediction=_prediction(body, limits),
        salt=_salt(body),
        retention_s=_retention_s(body),
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        priority=_PRIORITY_BY_TIER.get(body.service_tier or "default", base.priority),
    )
    choices = _choices([base], body.n or 1, limits, request_id, _seed(body))
    first, *others = with_beams(body, choices, body.n or 1)
    # The choices share one prompt, whose results are returned once.
    quiet = None if base.moderation is None else replace(base.moderation, tells_input=False)
    return first, *(
        replace(one, params=replace(one.params, num_prompt_logprobs=None), moderation=quiet) for one in others
    )


def text_generations(
    body: CompletionRequest, limits: LimitSettings, *, request_id: str
) -> tuple[GenerationRequest, ...]:
    """Return the requests of a text completion: for each prompt in order, one per computed answer."""
    prompts = text_prompts(body, limits)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError.about("max_tokens", "must be at least 1 unless 'echo' is true.")
    num_wanted, num_answers = body.n or 1, body.num_computed
    if num_answers < num_wanted:
        raise RequestError.about("best_of", f"({num_answers}) must be at least 'n' ({num_wanted}).")
    if num_answers > num_wanted and body.stream:
        raise RequestError.about("best_of", "greater than 'n' cannot be streamed.")
    scores = body.logprobs if num_answers == num_wanted else body.logprobs or 0
    grammar = answer_grammar(body, limits)
    bases = []
    for prompt in prompts:
        base = _generation(body, prompt, limits, body.max_tokens)
        asked = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        params = replace(base.params, num_logprobs=scores, num_prompt_logprobs=max(asked, default=None))
        # The default is clipped to the context instead of refused.
        clips = "max_tokens" not in body.model_fields_set
        bases.append(replace(base, params=params, echoes=bool(body.echo), grammar=grammar, clips_max_tokens=clips))
    # Whichever of `n` and `best_of` determines the count.
    field = "n" if num_answers == num_wanted else "best_of"
    choices = _choices(bases, num_answers, limits, request_id, _seed(body), field=field)
    return with_beams(body, choices, num_answers)


def _generation(
    body: SamplingFields, prompt: Prompt, limits: LimitSettings, max_tokens: int | None
) -> GenerationRequest:
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError.about("stream_options", "needs 'stream' to be true.")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RequestError.about("stream_options.continuous_usage_stats", "needs 'include_usage' to be true.")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise RequestError.about(
            "min_tokens", f"({body.min_tokens}) must be at most the answer's maximum tokens ({max_tokens})."
        )
    params = SamplingParams(
        max_tokens=max_tokens or 1,  # the gateway overwrites it once it knows the prompt's length
        **_given(**{name: getattr(body, name) for name in _AS_THEY_ARE}),
        top_k=max(0, body.top_k or 0),
        dry=_dry_penalty(body),
        lz=_lz_penalty(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body, limits),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        num_prompt_logprobs=body.prompt_logprobs,
    )
    return GenerationRequest(
        request_id="",  # set for each choice
        model=body.model,
        prompt=prompt,
        params=params,
        # Beam search does not sample.
        open_params=frozenset(name for name in READ if getattr(body, name) is None and not body.use_beam_search),
        max_tokens=max_tokens,
        bad_words=tuple(dict.fromkeys(body.bad_words or ())),
        dry_breakers=() if params.dry is None else _dry_breakers(body),
        stop=_stop_strings(body, limits),
        keeps_stop=bool(body.include_stop_str_in_output),
        shows_special=body.skip_special_tokens is False,
        returns_token_ids=bool(body.return_token_ids),
        salt=body.cache_salt or "",
        priority=body.priority or 0,
    )


def _stop_strings(body: SamplingFields, limits: LimitSettings) -> tuple[str, ...]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_count(len(stop), limits.max_stop_strings, "strings", field="stop")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= limits.max_stop_chars:
            field = "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            raise RequestError.about(
                field, f"must have 1 to {limits.max_stop_chars} characters; {len(text)} were given."
            )
    return tuple(dict.fromkeys(stop))


def _logit_bias(body: SamplingFields, limits: LimitSettings) -> tuple[tuple[int, float], ...]:
    bias = body.logit_bias or {}
    check_count(len(bias), limits.max_logit_bias, "entries", field="logit_bias")
    for key in bias:
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise RequestError.about("logit_bias", f"has the key {key[:32]!r}; keys must be token ids.")
    # Biases of one id in two spellings are added.
    return tuple((int(key), value) for key, value in bias.items())


def _dry_penalty(body: SamplingFields) -> DryPenalty | None:
    """Return the requested penalty; its breakers are passed separately, as text (`_dry_breakers`)."""
    if not body.dry_multiplier or body.dry_penalty_last_n == 0:
        return None
    return DryPenalty(
        multiplier=body.dry_multiplier,
        **_given(base=body.dry_base, allowed_length=body.dry_allowed_length, last_n=body.dry_penalty_last_n),
    )


def _dry_breakers(body: SamplingFields) -> tuple[str, ...]:
    texts = body.dry_sequence_breakers
    return DRY_BREAKERS if texts is None else tuple(dict.fromkeys(texts))


def _lz_penalty(body: SamplingFields) -> LzPenalty | None:
    if not body.lz_penalty:
        return None
    return LzPenalty(strength=body.lz_penalty, **_given(buffer=body.lz_buffer_size, lookback=body.lz_lookback_size))


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that the client gave; the parameters have defaults for the rest."""
    return {name: value for name, value in values.items() if value is not None}


def _prediction(body: ChatCompletionRequest, limits: LimitSettings) -> str:
    text = "" if body.prediction is None else joined_text(body.prediction.content)
    check_chars(len(text), limits, field=PREDICTION_FIELD)
    return text


def _salt(body: ChatCompletionRequest) -> str:
    salt = body.cache_salt or ""
    # Distinct pairs give distinct salts; without a key, chats share prefixes with text completions.
    return salt if body.prompt_cache_key is None else json.dumps([salt, body.prompt_cache_key])


def _retention_s(body: ChatCompletionRequest) -> float:
    options, longest = body.prompt_cache_options, body.prompt_cache_retention
    hours = [24.0 if longest == "24h" else 0.0, 0.0 if options is None else 12.0 if options.ttl == "12h" else 0.5]
    return 3600 * max(hours)


def _choices(
    bases: Sequence[GenerationRequest],
    count: int,
    limits: LimitSettings,
    request_id: str,
    seed: int,
    *,
    field: str = "n",
) -> tuple[GenerationRequest, ...]:
    """Return each request `count` times as siblings, with unique ids; the answers to one prompt get different seeds."""
    if len(bases) * count > limits.max_choices:
        raise RequestError.about(
            field, f"times the number of prompts must be at most {limits.max_choices}; it is {len(bases) * count}."
        )
    seeds = [(seed + index * _SEED_STEP) & _SEED_MASK for index in range(count)]
    siblings = Siblings()
    return tuple(
        replace(
            base,
            request_id=f"{request_id}-{place * count + index}",
            params=replace(base.params, seed=seeds[index]),
            siblings=siblings,
        )
        for place, base in enumerate(bases)
        for index in range(count)
    )


def _seed(body: SamplingFields) -> int:
    return (body.seed if body.seed is not None else random_seed()) & _SEED_MASK


def random_seed() -> int:
    """Draw a 64-bit seed for a request that has none."""
    return secrets.randbits(64)
