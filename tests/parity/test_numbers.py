"""Weights of few bits that become numbers as they are loaded: the tokens of a model that has those numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.config import EngineConfig
from tests.engine.number_checkpoints import CONFIGS, quantize_layers
from tests.parity.conftest import greedy, make_model, random_prompts, run_engine


def tokens_of(folder: Path) -> dict[str, list[int]]:
    engine = build_engine(EngineConfig(model_path=str(folder), dtype="float32", kv_cache_bytes=1 << 22, num_threads=2))
    return run_engine(engine, [greedy(str(n), prompt) for n, prompt in enumerate(random_prompts(6, longest=60))])


def write(folder: Path, family: str, kind: str) -> dict[str, list[int]]:
    """Write a model's weights in few bits; return the tokens of their numbers."""
    make_model(family).save_pretrained(folder)
    stored, meant = quantize_layers(load_file(folder / "model.safetensors"), kind)
    save_file(meant, folder / "model.safetensors")
    expected = tokens_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    save_file(stored, folder / "model.safetensors")
    return expected


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "nf4-nested"), ("granite", "modelopt"), ("qwen3-moe", "channel"), ("phi3", "nf4")]
)
def test_tokens_are_those_of_the_numbers(tmp_path: Path, family: str, kind: str) -> None:
    expected = write(tmp_path, family, kind)
    assert tokens_of(tmp_path) == expected
