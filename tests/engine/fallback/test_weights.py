"""Checkpoints of few bits of models that transformers computes: the logits of the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.errors import CheckpointError
from engine.fallback import loading
from engine.fallback.reading import read_stored_layout
from engine.fallback.weights import read_tensors
from tests.engine import fp8_checkpoints, int4_checkpoints, number_checkpoints
from tests.engine.fallback.saved import save

Q = "model.layers.1.self_attn.q_proj"
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{kind: (number_checkpoints, fields) for kind, fields in number_checkpoints.CONFIGS.items()},
    **{kind: (fp8_checkpoints, fp8_checkpoints.CONFIGS[kind]) for kind in ("channel", "fp8-block", "fp8-transformers")},
    **{kind: (int4_checkpoints, int4_checkpoints.config_of(kind)) for kind in ("awq", "gptq", "packed")},
}


def write(folder: Path, kind: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write a checkpoint of few bits, with `more` tensors; return those that it stands for."""
    module, fields = KINDS[kind]
    save(folder, hidden_size=128, intermediate_size=128, head_dim=32)
    stored, meant = module.quantize_layers(load_file(folder / "model.safetensors"), kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    save_file(stored | more, folder / "model.safetensors", {"format": "pt"})
    return {name: tensor.float() for name, tensor in meant.items()}


def numbers_of(folder: Path) -> dict[str, torch.Tensor]:
    layout = read_stored_layout(folder)
    assert layout is not None
    return read_tensors(str(folder), layout, torch.float32, is_part=False)


def load(folder: Path) -> PreTrainedModel:
    return loading._load(str(folder), "SeedOssForCausalLM", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_the_checkpoint_stands_for(tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path, kind)
    found = numbers_of(tmp_path)
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        torch.testing.assert_close(found[name], tensor, rtol=2**-20, atol=0.0)


@pytest.mark.parametrize("kind", ["awq", "nf4-nested", "fp8-block"])
def test_the_model_has_those_numbers(tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path, kind)
    held = load(tmp_path).state_dict()
    for name, tensor in meant.items():
        assert torch.equal(held[name], tensor)


def test_biases_of_zeros_and_scales_of_a_cache_are_passed_over(tmp_path: Path) -> None:
    bias = "model.layers.1.self_attn.o_proj.bias"
    write(tmp_path, "gptq", **{bias: torch.zeros(128), "model.layers.0.self_attn.k_scale": torch.ones(1)})
    load(tmp_path)
    write(tmp_path, "gptq", **{bias: torch.ones(128)})
    with pytest.raises(CheckpointError, match=f"unexpected keys: {bias}"):
        load(tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path, "awq", **{f"{Q}.scales": torch.ones(3, 5)})
    with pytest.raises(CheckpointError, match=f"the tensors of {Q} do not fit"):
        numbers_of(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: held for name, held in load_file(path).items() if name != f"{Q}.scales"}, path)
    with pytest.raises(CheckpointError, match=f"the tensor {Q}.scales is missing"):
        numbers_of(tmp_path)
