"""Weights that a CPU rounds to 4 bits: the tokens of a model that has the numbers which they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from kernels.packed_linear_int4.reference import to_levels
from tests.parity.conftest import greedy, make_model, random_prompts, run_engine


def tokens_of(folder: Path, quantization: str | None) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", quantization=quantization, kv_cache_bytes=1 << 22, num_threads=2
    )
    engine = build_engine(config)
    return run_engine(engine, [greedy(str(n), prompt) for n, prompt in enumerate(random_prompts(6, longest=60))])


@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (64, 96)])
def test_tokens_are_those_of_the_numbers(tmp_path: Path, hidden: int, inner: int) -> None:
    model = make_model("qwen2", hidden_size=hidden, intermediate_size=inner)
    model.save_pretrained(tmp_path / "whole")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            levels, scales, zeros = to_levels(module.weight.data)
            steps = levels.view(len(levels), scales.shape[1], -1).float() - zeros.float().unsqueeze(-1)
            module.weight.data = (steps * scales.unsqueeze(-1)).view(levels.shape)
    model.save_pretrained(tmp_path / "rounded")
    assert tokens_of(tmp_path / "whole", "int4") == tokens_of(tmp_path / "rounded", None)
