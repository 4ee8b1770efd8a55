"""Experts that a checkpoint has in MXFP4: the tokens of a model that has the numbers which they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.config import EngineConfig
from tests.engine.mxfp4_checkpoints import CONFIG, quantize_experts
from tests.parity.conftest import greedy, make_model, random_prompts, run_engine


def tokens_of(folder: Path, quantization: str | None) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", quantization=quantization, kv_cache_bytes=1 << 22, num_threads=2
    )
    engine = build_engine(config)
    return run_engine(engine, [greedy(str(n), prompt) for n, prompt in enumerate(random_prompts(6, longest=60))])


@pytest.mark.parametrize(("by", "quantization"), [("kernels", None), ("kernels", "int8"), ("operators", None)])
def test_tokens_are_those_of_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, quantization: str | None
) -> None:
    if by == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    make_model("gpt-oss").save_pretrained(tmp_path)
    stored, meant = quantize_experts(load_file(tmp_path / "model.safetensors"))
    save_file(meant, tmp_path / "model.safetensors")
    expected = tokens_of(tmp_path, quantization)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    save_file(stored, tmp_path / "model.safetensors")
    assert tokens_of(tmp_path, quantization) == expected
