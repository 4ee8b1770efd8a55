"""Activated adapters (aLoRA) against peft, token by token, and the base model's cache that they continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from adapters.activation import activation_start
from adapters.registry import reference
from engine.request import FinishReason
from tests.parity.adapter_serving import NUM_TOKENS, VOCAB, Serving, make_base, starting
from tests.parity.peft_adapters import ATTENTION, generated, load_adapters, save_adapters

BASE = "base"
INVOCATION = {"checker": [3, 5, 3], "writer": [9], "head": [3, 5, 3]}
CONFIGS: dict[str, dict[str, Any]] = {
    "checker": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "writer": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, "down_proj"], "lora_bias": True},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]},
}
ACTIVATED = {name: CONFIGS[name] | {"alora_invocation_tokens": ids} for name, ids in INVOCATION.items()}
PLAIN = {"plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}}
CONTEXT = torch.randint(10, VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = {
    "at the end": (*CONTEXT[:37], 3, 5, 3, 9),
    "in the middle": (*CONTEXT[:32], 9, 3, 5, 3, *CONTEXT[32:50]),
    "twice": (*CONTEXT[:9], 3, 5, 3, 9, *CONTEXT[9:48], 3, 5, 3, 5, 3, 9, 11),
    "at the beginning": (3, 5, 3, 9, *CONTEXT[:30]),
}
Expected = dict[tuple[str, str], tuple[int, ...]]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path_by_name(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(make_base(family), tmp_path_factory.mktemp(family), ACTIVATED | PLAIN)


@pytest.fixture
def serve(family: str, path_by_name: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    make_base(family).save_pretrained(str(tmp_path))
    with starting(str(tmp_path), path_by_name) as start:
        yield start


@pytest.fixture(scope="module")
def expected(family: str, path_by_name: dict[str, str]) -> Expected:
    model, answers = load_adapters(make_base(family), path_by_name), {}
    for place, prompt in PROMPTS.items():
        for name in (BASE, *path_by_name):
            if name != BASE:
                model.set_adapter(name)
            with model.disable_adapter() if name == BASE else nullcontext():
                answers[name, place] = generated(model, prompt, NUM_TOKENS)
    assert len(set(answers.values())) == len(answers), "adapters without effect prove nothing"
    return answers


def add(serving: Serving, name: str, place: str, **changes: object) -> Any:
    prompt = PROMPTS[place]
    start = activation_start(prompt, INVOCATION.get(name, ()))
    return serving.add(name, 1, prompt_ids=prompt, adapter_start=start, **changes)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batched_tokens": 7, "max_num_seqs": 7}, {"block_tokens": 4, "kv_cache_bytes": 150_000}],
    ids=["at once", "in chunks of 7", "in a small cache"],
)
def test_in_one_batch_with_others_each_generates_what_peft_generates(
    serve: Callable[..., Serving], expected: Expected, options: dict[str, int]
) -> None:
    serving = serve(**options)
    ids = {pair: add(serving, *pair) for pair in expected}
    done = serving.finish(list(ids.values()))
    for pair, request_id in ids.items():
        assert tuple(token for e in done[request_id] for token in e.token_ids) == expected[pair], pair
    if "kv_cache_bytes" in options:
        assert serving.engine.snapshot().counters.num_preemptions > 0


def test_what_the_base_has_computed_is_not_computed_again(serve: Callable[..., Serving], expected: Expected) -> None:
    serving = serve(block_tokens=4)

    def ask(name: str, place: str) -> int:
        (request_id,) = ids = [add(serving, name, place)]
        emissions = serving.finish(ids)[request_id]
        assert emissions[-1].finish_reason == FinishReason.LENGTH
        assert tuple(token for e in emissions for token in e.token_ids) == expected[name, place]
        return emissions[0].num_cached_tokens

    assert ask(BASE, "at the end") == 0
    # Up to the block in which an adapter starts; the last token of a prompt is always computed.
    assert ask("plain", "at the end") == 0
    assert ask("checker", "at the end") == 36
    assert ask("writer", "at the end") == 40
    assert ask("checker", "at the end") == 40
    # The other way round.
    assert ask("checker", "twice") == 8
    assert ask(BASE, "twice") == 52
    assert ask("head", "twice") == 52
    assert ask("writer", "twice") == 56


def test_a_resumed_answer_keeps_its_start_whatever_it_has_generated(
    serve: Callable[..., Serving], expected: Expected
) -> None:
    serving = serve(block_tokens=4)
    for place in PROMPTS:
        answer = expected["checker", place]
        for num_prior in (1, 13):
            request_id = add(serving, "checker", place, prior_output_ids=answer[:num_prior])
            emissions = serving.finish([request_id])[request_id]
            assert tuple(token for e in emissions for token in e.token_ids) == answer[num_prior:]


def test_a_reference_tells_what_activates_it(path_by_name: dict[str, str]) -> None:
    assert reference("checker", path_by_name["checker"]).invocation_ids == (3, 5, 3)
    assert reference("plain", path_by_name["plain"]).invocation_ids == ()
    config = peft.PeftConfig.from_pretrained(path_by_name["writer"])
    assert config.alora_invocation_tokens == [9]
