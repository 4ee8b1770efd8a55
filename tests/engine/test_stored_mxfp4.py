from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.errors import CheckpointError
from engine.loading.checkpoint import load_parameters
from engine.loading.contents import check_contents
from engine.loading.names import parameters
from engine.loading.weight import dense
from tests.engine.checkpoint_folder import write_config
from tests.engine.mxfp4_checkpoints import CONFIG, quantize_experts

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "attention_bias": True,
}


def tensors_of(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shapes_in_file(shape)[0], generator=generator)
        for parameter in parameters(spec)
        for name, shape in parameter.parts
    }


def loaded(path: str) -> dict[str, torch.Tensor]:
    named = load_parameters(path, read_spec(path), torch.float32, torch.device("cpu"))
    return {name: dense(weight) for name, weight in named}


def test_experts_are_halved_and_turned_whether_they_have_few_bits_or_not(tmp_path: Path) -> None:
    path = write_config(tmp_path, **GPT_OSS)
    stored, meant = quantize_experts(tensors_of(read_spec(path)))
    save_file(meant, tmp_path / "model.safetensors")
    expected = loaded(path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    both = expected["layers.0.experts.gate_up"]
    assert both.shape == (3, 128, 32)
    assert torch.equal(both[:, :64], meant[name][..., 0::2].transpose(1, 2))
    assert torch.equal(both[:, 64:], meant[name][..., 1::2].transpose(1, 2))
    assert torch.equal(expected["layers.0.experts.gate_up_bias"][:, 64:], meant[f"{name}_bias"][:, 1::2])
    write_config(tmp_path, **GPT_OSS, quantization_config=CONFIG)
    save_file(stored, tmp_path / "model.safetensors")
    check_contents(path, read_spec(path))
    found = loaded(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view_as(weight), weight) for name, weight in expected.items())


def test_experts_that_were_left_as_they_were_stay_so(tmp_path: Path) -> None:
    path = write_config(tmp_path, **GPT_OSS, quantization_config=CONFIG)
    _, meant = quantize_experts(tensors_of(read_spec(path)))
    save_file(meant, tmp_path / "model.safetensors")
    found = loaded(path)["layers.0.experts.down"]
    assert torch.equal(found, meant["model.layers.0.mlp.experts.down_proj"].transpose(1, 2))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_a_part_that_is_missing_or_of_another_shape_is_named(tmp_path: Path, part: str) -> None:
    path = write_config(tmp_path, **GPT_OSS, quantization_config=CONFIG)
    stored, _ = quantize_experts(tensors_of(read_spec(path)))
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    cut = stored | {name: stored[name][:, :-1].contiguous()}
    for tensors in (cut, {other: tensor for other, tensor in stored.items() if other != name}):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            check_contents(path, read_spec(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["mxfp4", "gpt-oss"]),
        ({"intermediate_size": 40}, ["down_proj", "40 inputs", "32"]),
        ({"swiglu_limit": 5.0}, ["swiglu_limit is 5.0", "7.0"]),
        ({"swiglu_alpha": 1.0}, ["swiglu_alpha is 1.0"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(write_config(tmp_path, **{**GPT_OSS, "quantization_config": CONFIG, **changes}))
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_family_is_what_transformers_says_of_it(tmp_path: Path) -> None:
    """Of a field that is left out too: every other layer has a window, and the rotation is YaRN's."""
    spec = read_spec(write_config(tmp_path, **GPT_OSS, num_hidden_layers=4))
    assert [form.window for form in spec.layers] == [128, 0, 128, 0]
    (rope,) = {form.rope for form in spec.layers}
    assert (rope.kind, rope.factor, rope.theta, rope.truncates) == ("yarn", 32.0, 150_000.0, False)
    assert spec.activation == "clamped"
    assert {name.rpartition(".")[2] for name in spec.adapted_shapes()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
