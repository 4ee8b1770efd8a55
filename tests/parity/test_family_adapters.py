"""Adapters on bases whose layers are not those of Llama, against peft, token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import peft
import pytest

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from kernels import native
from tests.parity.conftest import Checkpoint, greedy, make_model, random_prompts, run_engine
from tests.parity.peft_adapters import BESIDE_EXPERTS, BEYOND_PRODUCTS, FUSED, save_adapters, save_beyond_products

ENDS = ("head", "both-ends", "own-ends", "embedding-dora", "tokens", "tokens-of-each-end")
BEYOND = {name: BEYOND_PRODUCTS[name] for name in ("lora-bias", "dora", "norms", *ENDS)}


WITH_EXPERTS = ("olmoe", "qwen3-moe", "gpt-oss")
NAMES = ["gemma2", "gemma3", "granite", "olmo3", "phi3", "phi3-partial", "qwen3", "smollm3", *WITH_EXPERTS]


# Which modules there are is told of all by our kernels; torch's operators multiply whatever they are.
@pytest.mark.parametrize(
    ("name", "by"),
    [*((name, "kernels") for name in NAMES), *((name, "operators") for name in ("gemma2", "olmo3", "qwen3"))],
)
def test_adapters_mix_in_one_batch_and_generate_what_peft_generates(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by: str
) -> None:
    if by == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    else:
        assert native.load() is not None
    base = checkpoint(name)
    configs = FUSED if name.startswith("phi3") else BESIDE_EXPERTS if name in WITH_EXPERTS else BEYOND
    path_by_name = save_beyond_products(partial(make_model, name), tmp_path, configs)
    if configs is BEYOND:
        path_by_name |= save_adapters(make_model(name), tmp_path)
    adapters = [reference(adapter, path) for adapter, path in path_by_name.items()]
    prompts = random_prompts(len(adapters) + 1, longest=40)
    expected = {"base": base.generate(prompts[-1])}
    requests = [greedy("base", prompts[-1])]
    for adapter, prompt in zip(adapters, prompts[:-1], strict=True):
        model = peft.PeftModel.from_pretrained(make_model(name), path_by_name[adapter.name]).eval()
        expected[adapter.name] = Checkpoint(path=f"{base.path}/{adapter.name}", model=model).generate(prompt)
        requests.append(greedy(adapter.name, prompt, adapter=adapter.digest))
    engine = build_engine(EngineConfig(model_path=base.path, dtype="float32", num_threads=1), adapters)
    assert run_engine(engine, requests) == expected
