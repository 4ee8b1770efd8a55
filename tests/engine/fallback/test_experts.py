"""Which experts of transformers are ours to compute: those that are plain and gated, whatever their router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine.fallback.experts import activation_of
from tests.engine.fallback.saved import config_of

PLAIN = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = {**PLAIN, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


def activations_in(architecture: str, **fields: Any) -> list[str]:
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_of(architecture, **fields))
    return [found for module in model.modules() if (found := activation_of(module)) is not None]


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Glm4MoeForCausalLM", GROUPED, ["silu"]),
        ("Qwen3_5MoeForCausalLM", {**PLAIN, "num_experts": 4}, ["silu"] * 2),
        ("Gemma4ForCausalLM", GEMMA4, ["gelu"] * 2),
        ("Glm4MoeForCausalLM", {**GROUPED, "hidden_act": "relu"}, []),
        ("NemotronHForCausalLM", {**GROUPED, "layers_block_type": ["moe", "attention"]}, []),  # without gates
        ("GptOssForCausalLM", {"num_local_experts": 4}, []),  # gated in a way of its own, and with biases
        ("SeedOssForCausalLM", {}, []),
    ],
)
def test_experts_are_known_by_what_they_compute(architecture: str, fields: dict[str, Any], expected: list[str]) -> None:
    assert activations_in(architecture, **fields) == expected
