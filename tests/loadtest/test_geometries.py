from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from loadtest.geometries import CONFIG_BY_NAME, tensor_shapes, write_checkpoint

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def small(name: str) -> dict[str, object]:
    config = CONFIG_BY_NAME[name] | SMALL
    # In MXFP4 32 numbers share a scale.
    return config | {"intermediate_size": 64, "num_local_experts": 4} if name.startswith("gpt-oss") else config


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_transformers_finds_every_tensor_and_no_other(name: str, tmp_path: Path) -> None:
    write_checkpoint(small(name), tmp_path, shard_bytes=4096)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_shards_and_index_agree(tmp_path: Path) -> None:
    write_checkpoint(small("llama-3.1-8b"), tmp_path, shard_bytes=4096)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    found = {}
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    assert found == index["weight_map"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_the_named_shapes_have_the_published_sizes(name: str, parameters: int) -> None:
    sizes = [torch.Size(shape).numel() for _, shape in tensor_shapes(CONFIG_BY_NAME[name])]
    assert sum(sizes) == parameters


def test_equal_seeds_write_equal_weights(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_checkpoint(small("smollm2-135m"), tmp_path / folder, seed=5)
    name = "model-00001.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
