"""What a failed request leaves in the cache meets nobody, and what the runner does while it is idle changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.build import build_engine
from engine.cache.layout import CacheLayout
from engine.config import EngineConfig
from engine.decoder.model_spec import KvShape
from engine.engine import Engine
from engine.kv_cache import TOUCHED_AT_ONCE_BYTES, KvCache
from engine.request import Emission, FinishReason, Pooling, Request, RequestId, SamplingParams
from tests.deployments.tiny_models import write_chat_model
from tests.parity.conftest import greedy

POISON = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token's embedding is not a number."""
    folder = write_chat_model(tmp_path_factory.mktemp("chat"))
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # The output matrix is another tensor, so that only those who read the token are poisoned.
        model.model.embed_tokens.weight[POISON] = float("nan")
    model.save_pretrained(folder)
    return folder


def make_engine(folder: Path, **changes: Any) -> Engine:
    # Room for little more than one request: blocks are used again at once.
    config = EngineConfig(
        model_path=str(folder), dtype="float32", num_threads=1, max_model_len=64, block_tokens=4, kv_cache_bytes=20_000
    )
    return build_engine(replace(config, **changes))


def run(engine: Engine, *requests: tuple[str, tuple[int, ...]]) -> dict[str, list[Emission]]:
    for name, prompt in requests:
        engine.add(greedy(name, prompt, 6))
    emissions: dict[str, list[Emission]] = {name: [] for name, _ in requests}
    while not all(seen and seen[-1].finish_reason for seen in emissions.values()):
        for emission in engine.step():
            emissions[emission.request_id].append(emission)
    return emissions


def tokens(emissions: list[Emission]) -> list[int]:
    return [token_id for emission in emissions for token_id in emission.token_ids]


def test_numbers_that_are_not_finite_end_one_request_and_poison_no_other(folder: Path) -> None:
    clean = tuple(range(20, 41))
    expected = tokens(run(make_engine(folder), ("a", clean))["a"])
    engine = make_engine(folder)
    poisoned = (*range(50, 80), POISON, *range(80, 90))
    for attempt in range(4):
        found = run(engine, ("bad", poisoned), ("good", clean))
        assert found["bad"][-1].finish_reason is FinishReason.FAILED
        assert found["bad"][-1].error
        assert tokens(found["good"]) == expected, attempt
    assert engine.snapshot().kv_usage == 0


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_a_vector_that_is_not_finite_ends_its_request_alone(folder: Path, pooling: Pooling) -> None:
    engine = make_engine(folder)
    for name, prompt in (("bad", (1, POISON, 2)), ("good", (1, 2, 3))):
        params = SamplingParams(max_tokens=0)
        engine.add(Request(request_id=RequestId(name), prompt_ids=prompt, params=params, pooling=pooling))
    ends = {emission.request_id: emission for _ in range(4) for emission in engine.step()}
    assert ends[RequestId("bad")].finish_reason is FinishReason.FAILED
    assert ends[RequestId("bad")].error
    assert len(ends[RequestId("good")].pooled or b"") == 4 * 32
    assert engine.snapshot().kv_usage == 0


def test_what_was_summed_for_one_that_is_gone_is_in_no_vector_of_the_next(folder: Path) -> None:
    used, fresh = (
        make_engine(folder, max_num_seqs=1, max_batched_tokens=16, enable_prefix_cache=False) for _ in range(2)
    )
    prompt = tuple(range(20, 60))

    def add(engine: Engine, name: str, pooling: Pooling) -> None:
        params = SamplingParams(max_tokens=0)
        engine.add(Request(request_id=RequestId(name), prompt_ids=prompt, params=params, pooling=pooling))

    def vector(engine: Engine) -> bytes | None:
        add(engine, "last", Pooling.LAST)
        return next(emission.pooled for _ in range(9) for emission in engine.step() if emission.pooled is not None)

    add(used, "gone", Pooling.MEAN)
    assert used.step() == []
    used.cancel(RequestId("gone"))
    assert [emission.finish_reason for emission in used.step()] == [FinishReason.CANCELLED]
    assert vector(used) == vector(fresh)


def test_memory_taken_beforehand_leaves_what_the_cache_holds(folder: Path) -> None:
    rested, busy = make_engine(folder), make_engine(folder)
    prompts = [("a", (1, 2, 3, 4, 5, 6, 8)), ("b", (1, 2, 3, 4, 9))]
    for name, prompt in prompts:
        expected = tokens(run(busy, (name, prompt))[name])
        while rested._runner.idle():
            pass
        assert tokens(run(rested, (name, prompt))[name]) == expected


def test_taking_memory_beforehand_ends() -> None:
    cache = KvCache(
        layout=CacheLayout.single(1),
        num_blocks=40,
        block_tokens=16,
        kv_shapes=[KvShape(1, TOUCHED_AT_ONCE_BYTES // (2 * 16 * 4 * 16))],  # 16 blocks at once
        dtype=torch.float32,
        device=torch.device("cpu"),
        by_block=True,
    )
    cache.data[0, 0, 3] = 5.0
    assert [cache.touch(20) for _ in range(3)] == [True, True, False]
    assert [cache.touch(1000) for _ in range(3)] == [True, True, False]
    assert cache.data[0, 0, 3].eq(5.0).all()
    assert int((cache.data != 0).sum()) == cache.data[0, 0, 3].numel()


def test_blocks_of_any_size_are_taken_one_by_one_at_least() -> None:
    cache = KvCache(
        layout=CacheLayout.single(1),
        num_blocks=2,
        block_tokens=16,
        kv_shapes=[KvShape(1, TOUCHED_AT_ONCE_BYTES // 16)],
        dtype=torch.float32,
        device=torch.device("cpu"),
        by_block=True,
    )
    assert [cache.touch(10) for _ in range(3)] == [True, True, False]
