"""A request's tokens do not depend on its company, on chunks, on what the cache held, or on being sent back to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from tests.parity.conftest import Checkpoint, emissions_of, greedy, random_prompts, run_engine

PROMPTS = random_prompts(32, longest=90)


def make_engine(checkpoint: Checkpoint, **options: Any) -> Engine:
    return build_engine(EngineConfig(model_path=checkpoint.path, dtype="float32", num_threads=1, **options))


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


def test_a_hit_in_the_prefix_cache(family: Checkpoint) -> None:
    engine = make_engine(family, block_tokens=4)
    prompt = PROMPTS[1]
    longer = (*prompt, *PROMPTS[2])[:120]
    run_engine(engine, [greedy("first", prompt)])
    found = emissions_of(engine, [greedy("again", prompt), greedy("longer", longer)])
    assert found["again"][0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert found["longer"][0].num_cached_tokens >= len(prompt) // 4 * 4
    tokens = {name: [t for emission in emissions for t in emission.token_ids] for name, emissions in found.items()}
    assert tokens == {"again": family.generate(prompt), "longer": family.generate(longer)}


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preemption_in_a_cache_too_small_for_all(family: Checkpoint, enable_prefix_cache: bool) -> None:
    prompts = {str(i): prompt for i, prompt in enumerate(random_prompts(8, longest=24, seed=9))}
    config = family.model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(family) * 4
    engine = make_engine(
        family,
        block_tokens=4,
        max_model_len=72,
        kv_cache_bytes=80 * token_bytes,
        enable_prefix_cache=enable_prefix_cache,
    )
    found = run_engine(engine, [greedy(name, prompt, num_tokens=30) for name, prompt in prompts.items()])
    assert engine.snapshot().num_preemptions > 0
    assert found == {name: family.generate(prompt, 30) for name, prompt in prompts.items()}


def head_dim(checkpoint: Checkpoint) -> int:
    config = checkpoint.model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
