"""Weights that a CPU rounds to 4 bits (the output matrix: 8): the tokens of a model that has the rounded numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.config import EngineConfig
from kernels.packed_linear_int4.reference import GROUPS, group_of, to_levels
from kernels.packed_logits_int8.reference import embed_int8, to_bytes
from tests.engine.int4_checkpoints import config_of, quantize_layers
from tests.parity.conftest import greedy, make_model, random_prompts, run_engine


def tokens_of(folder: Path, quantization: str | None) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", quantization=quantization, kv_cache_bytes=1 << 22, num_threads=2
    )
    engine = build_engine(config)
    return run_engine(engine, [greedy(str(n), prompt) for n, prompt in enumerate(random_prompts(6, longest=60))])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    levels, scales, zeros = to_levels(weight)
    steps = levels.view(len(levels), scales.shape[1], -1).float() - zeros.float().unsqueeze(-1)
    return (steps * scales.unsqueeze(-1)).view(levels.shape)


def rounded_to_bytes(weight: torch.Tensor) -> torch.Tensor:
    return embed_int8(torch.arange(len(weight)), *to_bytes(weight, group_of(weight.shape[1])), weight.dtype)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"hidden_size": 128, "intermediate_size": 256}),
        ("qwen2", {}),
        ("qwen2-moe", {}),
        ("qwen3-moe", {"moe_intermediate_size": 128}),
        ("granite-moe", {}),
        ("gpt-oss", {}),
    ],
)
def test_tokens_are_those_of_the_numbers(tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    model = make_model(family, **sizes)
    model.save_pretrained(tmp_path / "whole")
    output = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = rounded(parameter.data)
        elif parameter is output and not parameter.shape[1] % min(GROUPS):
            parameter.data = rounded_to_bytes(parameter.data)
        elif parameter.dim() == 3:  # experts; what chooses them stays as it is
            experts = parameter.data.transpose(1, 2) if family == "gpt-oss" else parameter.data
            whole = torch.stack([rounded(expert) for expert in experts.contiguous()])
            parameter.data = whole.transpose(1, 2).contiguous() if family == "gpt-oss" else whole
    model.save_pretrained(tmp_path / "rounded")
    assert tokens_of(tmp_path / "whole", "int4") == tokens_of(tmp_path / "rounded", None)


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed"])
def test_experts_that_come_in_four_bits_are_multiplied_as_such(tmp_path: Path, kind: str) -> None:
    model = make_model("qwen3-moe", hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    model.save_pretrained(tmp_path)
    stored, meant = quantize_layers(load_file(tmp_path / "model.safetensors"), kind)
    save_file(meant, tmp_path / "model.safetensors")
    expected = tokens_of(tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": config_of(kind)}))
    save_file(stored, tmp_path / "model.safetensors")
    assert tokens_of(tmp_path, None) == expected
