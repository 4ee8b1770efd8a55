from __future__ import annotations

from typing import Any

import pytest

from app.makers_defaults import READ
from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.settings import LimitSettings
from app.translation.translate import chat_generations, random_seed, text_generations
from deployments.generation import GenerationRequest, TextPrompt
from engine.errors import RequestError
from engine.request import DryPenalty, LzPenalty, SamplingParams

LIMITS = LimitSettings()


@pytest.fixture(autouse=True)
def drawn_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.translation.translate.random_seed", lambda: 7)


def translate(**fields: Any) -> GenerationRequest:
    body = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    )
    (generation,) = chat_generations(body, LIMITS, request_id="r")
    return generation


def test_defaults_draw_from_the_plain_distribution() -> None:
    generation = translate()
    assert generation.params == SamplingParams(max_tokens=1, seed=7)
    assert (generation.max_tokens, generation.stop, generation.salt, generation.priority) == (None, (), "", 0)


def test_what_is_left_open_is_told_by_name() -> None:
    assert translate().open_params == set(READ)
    assert translate(temperature=1, top_k=-1, repetition_penalty=1).open_params == {"top_p", "min_p"}
    # Nothing of a search is drawn, nor penalised.
    assert translate(use_beam_search=True).open_params == set()


def test_null_is_the_default_everywhere() -> None:
    nulls = {name: None for name in ChatCompletionRequest.model_fields if name not in ("model", "messages")}
    assert translate(**nulls) == translate()


def test_every_field_arrives() -> None:
    generation = translate(
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, repetition_penalty=1.5, frequency_penalty=1,
        presence_penalty=-1, min_tokens=2, max_completion_tokens=9, ignore_eos=True, stop_token_ids=[4, 5],
        stop=["a", "b", "a"], priority=-3, cache_salt="s", top_n_sigma=1.5, typical_p=0.9, epsilon_cutoff=0.01,
        eta_cutoff=0.02, xtc_probability=0.5, xtc_threshold=0.2, include_stop_str_in_output=True,
    )  # fmt: skip
    assert generation.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, seed=2**64 - 1,
        repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-1.0, stop_token_ids=(4, 5), ignore_eos=True,
        top_n_sigma=1.5, typical_p=0.9, epsilon_cutoff=0.01, eta_cutoff=0.02, xtc_probability=0.5, xtc_threshold=0.2,
    )  # fmt: skip
    assert (generation.max_tokens, generation.stop, generation.keeps_stop) == (9, ("a", "b"), True)
    assert (generation.priority, generation.salt) == (-3, "s")


def test_a_cache_key_is_a_part_of_the_salt() -> None:
    keyed = translate(prompt_cache_key="k").salt
    assert keyed == translate(prompt_cache_key="k", cache_salt="").salt
    assert len({"", "s", "k", keyed, translate(prompt_cache_key="k", cache_salt="s").salt}) == 5
    assert (
        translate(prompt_cache_key='k", "', cache_salt="s").salt
        != translate(prompt_cache_key="k", cache_salt='s", "').salt
    )


@pytest.mark.parametrize(
    ("fields", "hours"),
    [
        ({}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 24),
        ({"prompt_cache_options": {}}, 0.5),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "12h"}}, 12),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 24),
    ],
)
def test_what_is_to_be_remembered_longer_says_how_long(fields: dict[str, Any], hours: float) -> None:
    assert translate(**fields).retention_s == 3600 * hours


@pytest.mark.parametrize(
    ("content", "text"),
    [("", ""), ("def f():", "def f():"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab")],
)
def test_a_prediction_is_text_or_text_parts_and_may_stand_beside_everything(content: Any, text: str) -> None:
    prediction = {"type": "content", "content": content}
    assert translate(prediction=prediction).prediction == text
    beside = {
        "logprobs": True,
        "presence_penalty": 0.5,
        "max_completion_tokens": 9,
        "response_format": {"type": "text"},
    }
    assert translate(prediction=prediction, **beside).prediction == text
    assert translate().prediction == ""


def test_penalties_of_repeats_arrive_with_their_defaults() -> None:
    assert translate(dry_base=3, lz_buffer_size=5).params == translate().params
    assert translate(dry_multiplier=0.8, dry_penalty_last_n=0).params.dry is None
    generation = translate(dry_multiplier=0.8, lz_penalty=0.1)
    assert generation.params.dry == DryPenalty(multiplier=0.8, base=1.75, allowed_length=2, last_n=-1)
    assert generation.params.lz == LzPenalty(strength=0.1, buffer=32, lookback=512)
    assert generation.dry_breakers == ("\n", ":", '"', "*")
    generation = translate(
        dry_multiplier=0.8, dry_base=3, dry_allowed_length=5, dry_penalty_last_n=9, dry_sequence_breakers=["x", "x"],
        lz_penalty=0.1, lz_buffer_size=4, lz_lookback_size=6,
    )  # fmt: skip
    assert generation.params.dry == DryPenalty(multiplier=0.8, base=3.0, allowed_length=5, last_n=9)
    assert generation.params.lz == LzPenalty(strength=0.1, buffer=4, lookback=6)
    assert generation.dry_breakers == ("x",)
    assert translate(dry_multiplier=0.8, dry_sequence_breakers=[]).dry_breakers == ()


def test_top_k_of_minus_one_keeps_all() -> None:
    assert translate(top_k=-1).params.top_k == 0


def test_either_name_of_max_tokens_counts_and_a_contradiction_is_refused() -> None:
    assert translate(max_tokens=5).max_tokens == 5
    assert translate(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="set one of them"):
        translate(max_tokens=5, max_completion_tokens=6)


def test_prompts_of_one_request_share_their_seed_and_not_their_id() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": ["a", "b"]})
    first, second = text_generations(body, LIMITS, request_id="r")
    assert first.params.seed == second.params.seed == 7
    assert (first.request_id, second.request_id) == ("r-0", "r-1")
    assert first.siblings is second.siblings


def test_drawn_seeds_differ_and_have_64_bits() -> None:
    seeds = {random_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_bounds_of_the_settings_hold_to_the_last_item() -> None:
    assert translate(stop=[str(i) for i in range(16)]).stop == tuple(str(i) for i in range(16))
    assert translate(stop="a" * 256).stop == ("a" * 256,)
    for stop in ([str(i) for i in range(17)], "a" * 257):
        with pytest.raises(RequestError) as wrong:
            translate(stop=stop)
        assert wrong.value.field == "stop"


def choices(**fields: Any) -> tuple[GenerationRequest, ...]:
    body = CompletionRequest.model_validate({"model": "m", "prompt": ["a", "b"], **fields})
    return text_generations(body, LIMITS, request_id="r")


def test_each_answer_to_a_prompt_has_its_own_id_and_seed_and_the_first_is_as_if_alone() -> None:
    found = choices(n=3)
    assert [generation.request_id for generation in found] == [f"r-{index}" for index in range(6)]
    seeds = [generation.params.seed for generation in found]
    assert seeds[0] == 7
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2})
    assert [one.params.seed for one in chat_generations(body, LIMITS, request_id="r")] == seeds[:2]


def test_a_suffix_goes_with_each_text() -> None:
    found = [choice.prompt for choice in choices(prompt=["a", "b"], suffix="c")]
    assert found == [TextPrompt(text="a", suffix="c"), TextPrompt(text="b", suffix="c")]
    assert choices(suffix="") == choices()


def test_best_of_computes_more_than_it_returns_and_needs_their_log_probabilities() -> None:
    found = choices(best_of=4, n=2)
    assert len(found) == 8
    assert {generation.params.num_logprobs for generation in found} == {0}
    assert {generation.params.num_logprobs for generation in choices(n=2)} == {None}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(index): 1 for index in range(1025)}}, "logit_bias"),
    ],
)
def test_what_contradicts_itself_or_is_too_much_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as wrong:
        choices(**fields)
    assert wrong.value.field == field


def test_only_a_length_that_was_asked_for_has_to_fit() -> None:
    assert [choices(**asked)[0].clips_max_tokens for asked in ({}, {"max_tokens": 16})] == [True, False]


def test_scores_are_asked_for_as_each_endpoint_has_them() -> None:
    assert translate(logprobs=True).params.num_logprobs == 0
    assert translate(logprobs=True, top_logprobs=5).params.num_logprobs == 5
    assert translate(logprobs=False).params.num_logprobs is None
    with pytest.raises(RequestError, match="needs 'logprobs'"):
        translate(top_logprobs=5)
    assert translate(top_logprobs=0).params.num_logprobs is None
    with_echo = choices(logprobs=2, echo=True, max_tokens=0)[0]
    assert (with_echo.params.num_logprobs, with_echo.params.num_prompt_logprobs) == (2, 2)
    assert (with_echo.echoes, with_echo.max_tokens) == (True, 0)
    assert choices(logprobs=2)[0].params.num_prompt_logprobs is None


def test_a_bound_on_the_answer_is_called_what_the_client_called_it() -> None:
    assert translate(max_tokens=5).max_tokens_field == "max_tokens"
    assert translate(max_completion_tokens=5).max_tokens_field == "max_completion_tokens"


def test_edits_of_the_logits_arrive() -> None:
    generation = translate(logit_bias={"5": -100, "7": 1.5}, allowed_token_ids=[3, 4, 3], bad_words=["x", "y", "x"])
    assert generation.params.logit_bias == ((5, -100.0), (7, 1.5))
    assert generation.params.allowed_token_ids == (3, 4)
    assert generation.bad_words == ("x", "y")


def test_tiers_are_priorities() -> None:
    order = [translate(service_tier=tier).priority for tier in ("priority", "default", "auto", "flex")]
    assert order == [-8, 0, 0, 8]
    assert translate(service_tier=None, priority=3).priority == 3
    assert translate(service_tier="default", priority=3).priority == 3
