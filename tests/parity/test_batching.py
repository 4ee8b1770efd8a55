"""A request's tokens do not depend on its company, on chunks, on what the cache held, or on being sent back to wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engine.request import Emission, Pooling, Request, RequestId, SamplingParams
from engine.scheduling.step_costs import StepCosts
from tests.parity.conftest import BUNDLED, Checkpoint, emissions_of, greedy, make_engine, random_prompts, run_engine
from tests.parity.interrupted import interrupted

PROMPTS = random_prompts(32, longest=90)


def expected(checkpoint: Checkpoint) -> dict[str, list[int]]:
    return {str(i): checkpoint.generate(prompt) for i, prompt in enumerate(PROMPTS)}


def test_thirty_two_mixed_lengths_in_one_batch(family: Checkpoint) -> None:
    engine = make_engine(family, max_num_seqs=32, max_batched_tokens=4096)
    assert run_engine(engine, [greedy(str(i), prompt) for i, prompt in enumerate(PROMPTS)]) == expected(family)


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_prefill_in_chunks_of_seven(checkpoint: Callable[[str], Checkpoint], block_tokens: int) -> None:
    model = checkpoint("llama3")
    engine = make_engine(model, max_batched_tokens=7, block_tokens=block_tokens)
    chosen = {str(i): prompt for i, prompt in enumerate(PROMPTS[:8])}
    wanted = {name: model.generate(prompt) for name, prompt in chosen.items()}
    assert run_engine(engine, [greedy(name, prompt) for name, prompt in chosen.items()]) == wanted


def test_prefill_in_chunks_of_seven_in_every_family(family: Checkpoint) -> None:
    engine = make_engine(family, max_batched_tokens=7)
    assert run_engine(engine, [greedy("1", PROMPTS[1])]) == {"1": family.generate(PROMPTS[1])}


def test_alone_and_by_a_hit_in_the_prefix_cache(family: Checkpoint) -> None:
    engine = make_engine(family, block_tokens=4)
    prompt = PROMPTS[1]
    longer = (*prompt, *PROMPTS[2])[:120]
    assert run_engine(engine, [greedy("first", prompt)]) == {"first": family.generate(prompt)}
    found = emissions_of(engine, [greedy("again", prompt), greedy("longer", longer)])
    assert found["again"][0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert found["longer"][0].num_cached_tokens >= len(prompt) // 4 * 4
    tokens = {name: [t for emission in emissions for t in emission.token_ids] for name, emissions in found.items()}
    assert tokens == {"again": family.generate(prompt), "longer": family.generate(longer)}


@pytest.mark.parametrize("name", ["llama3", "qwen3-window"])
def test_prefixes_that_were_thrown_out_come_back_from_disk(
    checkpoint: Callable[[str], Checkpoint], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a model computes a prompt sooner than anything is fetched.
    monkeypatch.setattr(StepCosts, "saved_s", lambda *_: math.inf)
    model = checkpoint(name)
    options = {
        "block_tokens": 4,
        "max_model_len": 120,
        "kv_cache_bytes": 160 * model.token_bytes,
        "kv_disk_bytes": 4000 * model.token_bytes,
        "kv_disk_folder": str(tmp_path),
    }
    chosen = {str(i): prompt for i, prompt in enumerate(PROMPTS[:12]) if len(prompt) > 20}
    wanted = {name: model.generate(prompt) for name, prompt in chosen.items()}
    fetched = []
    for _ in range(2):
        engine = make_engine(model, **options)
        for _ in range(2):
            for name, prompt in chosen.items():
                assert run_engine(engine, [greedy(name, prompt)]) == {name: wanted[name]}
        fetched.append(engine.snapshot().fetched_tokens)
        engine.stop()
        engine.run(lambda _: None)
    # What the second one fetched at first the one before it had left there.
    assert fetched[1] > fetched[0] > 0


def check_preemption(model: Checkpoint, *, enable_prefix_cache: bool = True) -> None:
    """Run more requests than the cache has room for."""
    prompts = {str(i): prompt for i, prompt in enumerate(random_prompts(8, longest=24, seed=9))}
    engine = make_engine(
        model,
        block_tokens=4,
        max_model_len=72,
        kv_cache_bytes=80 * model.token_bytes,
        enable_prefix_cache=enable_prefix_cache,
    )
    found = run_engine(engine, [greedy(name, prompt, num_tokens=30) for name, prompt in prompts.items()])
    assert engine.snapshot().counters.num_preemptions > 0
    assert found == {name: model.generate(prompt, 30) for name, prompt in prompts.items()}


# Of a family a preemption sees windows and no more.
@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3", "qwen3-window", "mistral-window", "gpt-oss", "qwen3-moe", BUNDLED.name]
)
def test_preemption_in_a_cache_too_small_for_all(checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    check_preemption(checkpoint(name))


@pytest.mark.parametrize("name", ["llama3", "ministral", "gpt-oss"])
def test_without_a_prefix_cache_all_of_a_preempted_request_is_computed_again(
    checkpoint: Callable[[str], Checkpoint], name: str
) -> None:
    check_preemption(checkpoint(name), enable_prefix_cache=False)


def a_request(number: int, tenant: str) -> Request:
    """Every third draws, every fourth is held to penalties, every fifth wants a vector."""
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if number % 4 == 0 else {}
    params = SamplingParams(
        max_tokens=20, temperature=float(number % 3 == 0), seed=number, ignore_eos=True, **penalties
    )
    return Request(
        request_id=RequestId(str(number)),
        prompt_ids=PROMPTS[number],
        params=params,
        pooling=Pooling.MEAN if number % 5 == 0 else None,
        tenant=tenant,
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo3", "qwen2-moe", "qwen3-moe"])
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=["float32", "int8", "int4"]
)
def test_a_step_that_newcomers_went_before_goes_on_as_if_it_had_not_paused(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, options: dict[str, str], name: str
) -> None:
    model = checkpoint(name)
    undisturbed = emissions_of(make_engine(model, **options), [a_request(number, "") for number in range(24)])
    # All rows are taken: newcomers are guests.
    engine = make_engine(model, max_num_seqs=16, max_batched_tokens=120, **options)
    found: dict[str, list[Emission]] = {name: [] for name in undisturbed}
    for number in range(16):
        engine.add(a_request(number, "first"))
    latecomers = [partial(engine.add, a_request(number, f"late {number}")) for number in range(23, 15, -1)]
    with interrupted(engine, latecomers, monkeypatch) as asides:
        while latecomers or engine.snapshot().num_running:
            for emission in engine.step():
                found[emission.request_id].append(emission)
    assert len(asides) > 1
    for name, expected_emissions in undisturbed.items():
        tokens, expected_tokens = (
            [token_id for told in emissions for token_id in told.token_ids]
            for emissions in (found[name], expected_emissions)
        )
        assert tokens == expected_tokens
        # By which chunks a prompt is computed shows in the last bits.
        numbers = [np.frombuffer(told[-1].pooled or b"", np.float32) for told in (found[name], expected_emissions)]
        np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-5)
