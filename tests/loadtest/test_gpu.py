"""The GPU's benchmark without a GPU: what it would run runs, small, and its floors are arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import build
from engine.costs import prompt_flop
from engine.decoder.spec import read_spec
from engine.gpu.build import gpu_parts
from kernels.launches import Geometry
from kernels.lora_shrink import launch as shrink_launch
from kernels.paged_attention import launch as attention_launch
from kernels.streamed_linear import launch as streamed_launch
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from loadtest.gpu import engine, kernels
from loadtest.gpu.timing import Ceilings
from tests.engine.gpu.host_runtime import HostRuntime

CEILINGS = Ceilings(bytes_per_s=4e12, flop_per_s=8e14)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 700,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(shrink_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 2)


def test_a_floor_is_the_longer_of_moving_and_computing() -> None:
    assert CEILINGS.floor_s(4e12, 0) == 1.0
    assert CEILINGS.floor_s(4e12, 16e14) == 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs there")
def test_every_kernel_is_run_on_what_it_takes() -> None:
    geometry = Geometry(name="tiny", hidden=128, inner=128, heads=8, kv_heads=2, head_dim=16)
    found = list(kernels.benches(geometry, torch.device("cpu"), scale=512))
    for bench in found:
        bench.run()
        assert bench.num_bytes > 0
    assert len({bench.name.split(",")[0] for bench in found}) == 12


def test_the_floors_of_a_known_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["llama-3.1-8b"]))
    spec = read_spec(str(tmp_path))
    work = engine.Work(model="llama-3.1-8b", batch=64, context=1024, answer_tokens=0)
    # 8.03 billion weights, less the embedding of which a step reads some rows, and 128 KiB of cache for each token.
    assert engine.step_bytes(spec, work, 2) == pytest.approx(2 * 7.505e9 + 64 * 1024 * 131_072, rel=1e-3)
    halved = replace(work, quantization="fp8", kv_cache_dtype="fp8")
    # The output matrix stays in two bytes, and every key and value of 128 bytes has a span of four.
    assert engine.step_bytes(spec, halved, 2) == pytest.approx(
        6.980e9 + 2 * 0.525e9 + 64 * 1024 * 65_536 * 132 / 128, rel=1e-3
    )
    # Half a byte for each weight of a layer, and three for each group of 128.
    assert engine.step_bytes(spec, replace(work, batch=0, quantization="int4"), 2) == pytest.approx(
        6.980e9 * (0.5 + 3 / 128) + 2 * 0.525e9, rel=1e-3
    )
    assert prompt_flop(spec, 8192) == pytest.approx(0.132e15, rel=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs there")
def test_engine_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu_parts", partial(gpu_parts, runtime=HostRuntime()))
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    work = engine.Work(model="tiny", batch=2, context=5, answer_tokens=3, target=0.9)
    works = (work, replace(work, num_adapters=2), replace(work, batch=1, answer_tokens=1))
    monkeypatch.setitem(engine.WORKS_BY_MODEL, "tiny", works)
    results = engine.measure(
        "tiny", CEILINGS, device="cpu", dtype="float32", max_batched_tokens=16, num_threads=1, kv_cache_bytes=1 << 20
    )
    assert [result.title for result in results] == [work.title for work in works]
    assert all(result.step_ms > result.floor_ms > 0 for result in results)
    assert results[0].target == 0.9


def test_random_weights_fill_a_decoder(tmp_path: Path) -> None:
    write_checkpoint(CONFIG_BY_NAME["qwen3-0.6b"] | TINY | {"head_dim": 16}, tmp_path)
    spec = read_spec(str(tmp_path))
    found = dict(engine.random_weights("", spec, torch.float32, torch.device("cpu")))
    assert {"embedding", "layers.0.q_norm", "layers.0.qkv.weight", "norm"} <= set(found)
    assert all(tensor.isfinite().all() for tensor in found.values())
