"""Log-probabilities are those of transformers, of the answer and of the prompt, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Emission, Request, TokenLogprobs
from tests.parity.conftest import MAX_LEN, Checkpoint, emissions_of, greedy, random_prompts

NUM_TOP = 4


def make_engine(checkpoint: Checkpoint, **options: int | bool) -> Engine:
    defaults = {"max_model_len": MAX_LEN, "num_threads": 1, "max_num_seqs": 8}
    return build_engine(EngineConfig(model_path=checkpoint.path, dtype="float32", **defaults | options))  # type: ignore[arg-type]


def asking(name: str, prompt: tuple[int, ...], *, of_prompt: bool = True) -> Request:
    request = greedy(name, prompt, 4)
    params = replace(request.params, num_logprobs=NUM_TOP, num_prompt_logprobs=NUM_TOP if of_prompt else None)
    return replace(request, params=params)


def check(checkpoint: Checkpoint, prompt: tuple[int, ...], emissions: list[Emission]) -> None:
    answer = [token_id for emission in emissions for token_id in emission.token_ids]
    told = [entry for emission in emissions for entry in emission.prompt_logprobs]
    told += [entry for emission in emissions for entry in emission.logprobs]
    assert sum(bool(emission.prompt_logprobs) for emission in emissions) == (len(prompt) > 1)
    tokens = [*prompt, *answer]
    expected = torch.log_softmax(checkpoint.logits(tokens)[:-1], dim=-1)
    assert len(told) == len(tokens) - 1
    for place, (token_id, entry) in enumerate(zip(tokens[1:], told, strict=True)):
        check_one(expected[place], token_id, entry)


def check_one(expected: torch.Tensor, token_id: int, entry: TokenLogprobs) -> None:
    assert entry.logprob == pytest.approx(float(expected[token_id]), abs=2e-3)
    assert (expected > entry.logprob + 4e-3).sum() < entry.rank <= (expected >= entry.logprob - 4e-3).sum()
    likeliest = expected.topk(NUM_TOP)
    assert [logprob for _, logprob in entry.top] == pytest.approx(likeliest.values.tolist(), abs=2e-3)
    assert all(float(expected[other]) == pytest.approx(logprob, abs=2e-3) for other, logprob in entry.top)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batched_tokens": 7}, {"max_num_seqs": 3}, {"enable_prefix_cache": False}],
    ids=["whole", "chunks of 7", "three rows of logits", "no prefix cache"],
)
def test_those_of_prompt_and_answer_are_transformers_own(
    checkpoint: Callable[[str], Checkpoint], options: dict[str, int | bool]
) -> None:
    model = checkpoint("llama3")
    prompts = random_prompts(6, 40)
    requests = [asking(str(index), prompt) for index, prompt in enumerate(prompts)]
    found = emissions_of(make_engine(model, **options), requests)
    for index, prompt in enumerate(prompts):
        check(model, prompt, found[str(index)])


def test_a_cached_prompt_is_scored_all_the_same_and_shared_afterwards(checkpoint: Callable[[str], Checkpoint]) -> None:
    model = checkpoint("qwen2")
    engine = make_engine(model)
    (prompt,) = random_prompts(1, 1)
    prompt = prompt * 50
    for name in ("first", "second"):
        (emissions,) = emissions_of(engine, [asking(name, prompt)]).values()
        assert emissions[-1].num_cached_tokens == 0
        check(model, prompt, emissions)
    (emissions,) = emissions_of(engine, [asking("third", prompt, of_prompt=False)]).values()
    assert emissions[-1].num_cached_tokens == 48
    assert all(not emission.prompt_logprobs for emission in emissions)


def test_pre_empted_requests_are_scored_whole(checkpoint: Callable[[str], Checkpoint]) -> None:
    model = checkpoint("llama2")
    block_bytes = 3 * 2 * 4 * 16 * 4 * 16
    engine = make_engine(model, kv_cache_bytes=16 * block_bytes, max_batched_tokens=24, max_num_seqs=6)
    prompts = random_prompts(6, 60, seed=9)
    asked = [asking(str(index), prompt) for index, prompt in enumerate(prompts)]
    requests = [replace(request, params=replace(request.params, max_tokens=90)) for request in asked]
    found = emissions_of(engine, requests)
    assert engine.snapshot().counters.num_preemptions > 0
    for index, prompt in enumerate(prompts):
        check(model, prompt, found[str(index)])


def test_whoever_does_not_ask_is_told_nothing(checkpoint: Callable[[str], Checkpoint]) -> None:
    found = emissions_of(make_engine(checkpoint("llama2")), [greedy("a", (1, 2, 3)), asking("b", (1, 2, 3))])
    assert all(not emission.logprobs and not emission.prompt_logprobs for emission in found["a"])
    assert all(emission.logprobs for emission in found["b"] if emission.token_ids)
