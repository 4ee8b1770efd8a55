from __future__ import annotations

from typing import Any

import pytest

from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.settings import LimitSettings
from app.translate import chat_generation, random_seed, text_generations
from deployments.generation import GenerationRequest
from engine.errors import RequestError
from engine.request import SamplingParams

LIMITS = LimitSettings()


def translate(**fields: Any) -> GenerationRequest:
    body = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    )
    return chat_generation(body, LIMITS, request_id="r", draw_seed=lambda: 7)


def test_defaults_draw_from_the_plain_distribution() -> None:
    generation = translate()
    assert generation.params == SamplingParams(max_tokens=1, seed=7)
    assert (generation.max_tokens, generation.stop, generation.salt, generation.priority) == (None, (), "", 0)


def test_null_is_the_default_everywhere() -> None:
    nulls = {name: None for name in ChatCompletionRequest.model_fields if name not in ("model", "messages")}
    assert translate(**nulls) == translate()


def test_every_field_arrives() -> None:
    generation = translate(
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, repetition_penalty=1.5, frequency_penalty=1,
        presence_penalty=-1, min_tokens=2, max_completion_tokens=9, ignore_eos=True, stop_token_ids=[4, 5],
        stop=["a", "b", "a"], priority=-3, cache_salt="s",
    )  # fmt: skip
    assert generation.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, seed=2**64 - 1,
        repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-1.0, stop_token_ids=(4, 5), ignore_eos=True,
    )  # fmt: skip
    assert (generation.max_tokens, generation.stop) == (9, ("a", "b"))
    assert (generation.priority, generation.salt) == (-3, "s")


def test_top_k_of_minus_one_keeps_all() -> None:
    assert translate(top_k=-1).params.top_k == 0


def test_either_name_of_max_tokens_counts_and_a_contradiction_is_refused() -> None:
    assert translate(max_tokens=5).max_tokens == 5
    assert translate(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="set one of them"):
        translate(max_tokens=5, max_completion_tokens=6)


def test_prompts_of_one_request_share_their_seed_and_not_their_id() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": ["a", "b"]})
    first, second = text_generations(body, LIMITS, request_id="r", draw_seed=lambda: 7)
    assert first.params.seed == second.params.seed == 7
    assert (first.request_id, second.request_id) == ("r-0", "r-1")


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
