from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.decoder.rope import parse_rope
from engine.decoder.rope_table import rope_table
from tests.engine.test_rope import LLAMA3, LONGROPE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 2.0},
        {**YARN, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "dynamic", "factor": 2.0},
    ],
)
@pytest.mark.parametrize("theta", [10000.0, 500.0])
@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 32}])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_cosines_and_sines_are_those_of_transformers(
    rope: dict[str, Any], theta: float, beside: dict[str, int], form: str
) -> None:
    told: dict[str, Any] = {**beside, "max_position_embeddings": 256}
    told |= {form: {**rope, "rope_theta": theta}} if form == "rope_parameters" else {form: rope, "rope_theta": theta}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, **deepcopy(told))
    positions = torch.arange(256).unsqueeze(0)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = rope_table(parse_rope(told, "here"), 32, 256, torch.float32)
    # The last place of an angle of 255 is 1.5e-5.
    torch.testing.assert_close(table[:, 0], cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"factor": 2.0}, {"attention_factor": 1.25}])
def test_longrope_is_that_of_transformers_as_far_as_it_was_trained(options: dict[str, float]) -> None:
    told = {"max_position_embeddings": 256, "rope_parameters": {**LONGROPE, "rope_theta": 1e4, **options}}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, **deepcopy(told))
    spec = parse_rope(told, "here")
    assert spec.bound == 64
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(64).unsqueeze(0))
    table = rope_table(spec, 32, 64, torch.float32)
    torch.testing.assert_close(table[:, 0], cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0], atol=2e-5, rtol=0)


def test_what_does_not_rotate_is_multiplied_by_1() -> None:
    table = rope_table(parse_rope({"partial_rotary_factor": 0.5}, "here"), 32, 9, torch.float32)
    assert torch.equal(table[:, :, :16], rope_table(parse_rope({}, "here"), 16, 9, torch.float32))
    assert table[:, 0, 16:].eq(1).all()
    assert table[:, 1, 16:].eq(0).all()
