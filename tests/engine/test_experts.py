from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.decoder.experts import ExpertSpec
from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from engine.loading.names import parameters
from tests.engine.checkpoint_folder import write_config

QWEN = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}


def shapes(folder: Path, architecture: str) -> dict[str, tuple[int, ...]]:
    spec = read_spec(write_config(folder, architectures=[architecture], **FEW))
    return {parameter.name: parameter.shape for parameter in parameters(spec)}


def test_a_mixture_is_what_config_json_says(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, **QWEN))
    assert spec.experts == ExpertSpec(count=6, chosen=2, inner_size=8, is_normed=False, shared_size=12)
    # As transformers writes it anew.
    assert (
        read_spec(write_config(tmp_path, **QWEN | {"num_experts": None, "num_local_experts": 6})).experts
        == spec.experts
    )
    mixtral = read_spec(write_config(tmp_path, architectures=["MixtralForCausalLM"], **FEW))
    assert mixtral.experts == ExpertSpec(count=4, chosen=2, inner_size=24, is_normed=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
    ],
)
def test_some_layers_are_dense(tmp_path: Path, changes: dict[str, Any], expected: list[bool]) -> None:
    assert [form.is_sparse for form in read_spec(write_config(tmp_path, **QWEN, **changes)).layers] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok is 7", "num_experts is 6"]),
        ({"num_experts": 0}, ["num_experts"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size"]),
        ({"shared_expert_intermediate_size": None}, ["shared_expert_intermediate_size"]),
        ({"mlp_only_layers": [4]}, ["mlp_only_layers", "4 layers"]),
        ({"mlp_only_layers": 1}, ["mlp_only_layers"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob"]),
        ({"use_sliding_window": True}, ["use_sliding_window is True", "only False"]),
        ({"qkv_bias": False}, ["qkv_bias is False", "only True"]),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, ["clip_qkv is 8.0", "only None"]),
    ],
)
def test_a_field_that_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(write_config(tmp_path, **{**QWEN, **changes}))
    assert all(word in str(caught.value) for word in words), caught.value


def test_experts_are_linear_modules_and_what_chooses_them_keeps_its_numbers(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, **QWEN, mlp_only_layers=[0]))
    linear, taking = spec.linear_shapes(), spec.module_shapes()
    assert linear["model.layers.1.mlp.experts.5.down_proj"] == (8, 16)
    assert linear["model.layers.3.mlp.shared_expert.gate_proj"] == (16, 12)
    assert not any(name.endswith("gate") for name in linear), "it would be quantized"
    assert {name: shape for name, shape in taking.items() if "layers.1.mlp." in name} == {
        "model.layers.1.mlp.gate": (16, 6),
        "model.layers.1.mlp.experts.gate_up_proj": (6, 16, 2, 8),
        "model.layers.1.mlp.experts.gate_proj": (6, 16, 8),
        "model.layers.1.mlp.experts.up_proj": (6, 16, 8),
        "model.layers.1.mlp.experts.down_proj": (6, 8, 16),
        "model.layers.1.mlp.shared_expert.gate_proj": (16, 12),
        "model.layers.1.mlp.shared_expert.up_proj": (16, 12),
        "model.layers.1.mlp.shared_expert.down_proj": (12, 16),
    }
    assert "model.layers.0.mlp.gate_proj" in taking
    assert "model.layers.0.mlp.experts.gate_up_proj" not in taking
    assert "model.layers.1.mlp.gate_proj" not in taking
    assert "model.layers.1.self_attn.q_proj" in taking
    assert spec.linear_sizes() == {*linear.values()}


@pytest.mark.parametrize(
    ("architecture", "stack", "shape", "modules"),
    [
        ("MixtralForCausalLM", "mlp.experts", (4, 16, 2, 24), {"block_sparse_moe.experts.w1"}),
        ("GraniteMoeForCausalLM", "block_sparse_moe.experts", (4, 16, 2, 24), set()),
        ("GptOssForCausalLM", "mlp.experts", (4, 16, 24, 2), set()),
    ],
)
def test_adapters_call_the_experts_of_a_family_as_transformers_does(
    tmp_path: Path, architecture: str, stack: str, shape: tuple[int, ...], modules: set[str]
) -> None:
    taking = read_spec(write_config(tmp_path, architectures=[architecture], **FEW)).module_shapes()
    assert taking[f"model.layers.0.{stack}.gate_up_proj"] == shape
    assert taking[f"model.layers.0.{stack}.down_proj"] == (4, 24, 16)
    assert {name for name in modules if f"model.layers.0.{name}" in taking} == modules
    assert any(name.endswith("w2") for name in taking) == bool(modules)


def test_experts_lie_one_below_the_other_gate_before_up(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, architectures=["MixtralForCausalLM"], **FEW))
    by_name = {parameter.name: parameter for parameter in parameters(spec)}
    each = by_name["layers.1.experts.gate_up"]
    assert [name for name, _ in each.parts[:3]] == [
        f"model.layers.1.block_sparse_moe.experts.{part}.weight" for part in ("0.w1", "0.w3", "1.w1")
    ]
    assert each.shape == (4 * 2 * 24, 16)
    assert by_name["layers.1.experts.down"].parts[3] == (
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        (16, 24),
    )
    assert by_name["layers.1.router"].parts == (("model.layers.1.block_sparse_moe.gate.weight", (4, 16)),)


def test_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    found = shapes(tmp_path, "GraniteMoeForCausalLM")
    assert found["layers.0.experts.gate_up"] == (4, 48, 16)
    assert found["layers.0.experts.down"] == (4, 16, 24)
