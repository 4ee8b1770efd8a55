from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from adapters.errors import AdapterError
from adapters.peft_format import LoraConfig, parse_config
from adapters.tensor_names import HEAD, WHOLE_MODEL, parse_module_name, parse_tensor_name, prefixes_of
from tests.adapters.handmade import make_config

Q3 = "model.layers.3.self_attn.q_proj"


def parse(**changes: Any) -> LoraConfig:
    return parse_config("demo", json.dumps(make_config(**changes)).encode())


def test_tensor_names_give_module_and_part() -> None:
    for tensor, part in (
        (f"{Q3}.lora_A.weight", "lora_A.weight"),
        (f"{Q3}.lora_B.bias", "lora_B.bias"),
        (f"{Q3}.base_layer.bias", "bias"),
        (f"{Q3}.bias", "bias"),
        (f"{Q3}.lora_magnitude_vector", "lora_magnitude_vector"),
        ("model.embed_tokens.lora_embedding_A", "lora_embedding_A"),
        ("lm_head.base_layer.weight", "base_layer.weight"),
        ("lm_head.token_adapter.base_layer.weight", "base_layer.weight"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens_delta"),
        ("model.norm.weight", "weight"),
    ):
        module = tensor.removesuffix(f".{part}").removesuffix(".base_layer").removesuffix(".token_adapter")
        assert parse_tensor_name("demo", f"base_model.model.{tensor}") == (module, part)
        assert parse_tensor_name("demo", tensor) == (module, part)


def test_an_adapter_of_the_decoder_alone_has_names_without_it() -> None:
    name = "base_model.model.layers.3.self_attn.q_proj.lora_A.weight"
    assert parse_tensor_name("demo", name) == (Q3, "lora_A.weight")
    assert prefixes_of(f"base_model.model.{Q3}.lora_A.weight") == ("", "")
    assert prefixes_of("base_model.model.lm_head.lora_A.weight") == ("", "")
    config = parse(
        target_modules=r"layers\.\d+\.self_attn\.q_proj",
        rank_pattern={r"^layers\.3\.self_attn\.q_proj": 2},
        alpha_pattern={r"^layers\.3\.self_attn\.q_proj": 10},
    )
    assert (config.has_target(Q3), config.rank_of(Q3), config.scaling_of(Q3)) == (False, 4, 2)
    config = replace(config, prefixes=prefixes_of(name))
    assert (config.has_target(Q3), config.rank_of(Q3), config.scaling_of(Q3)) == (True, 2, 5)


@pytest.mark.parametrize(
    ("decoder", "head"),
    [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head")],
)
def test_an_adapter_of_a_model_that_sees_has_names_with_more_in_front(decoder: str, head: str) -> None:
    name = f"base_model.model.{decoder}layers.3.self_attn.q_proj.lora_A.weight"
    assert parse_tensor_name("demo", name) == (Q3, "lora_A.weight")
    assert parse_tensor_name("demo", f"base_model.model.{head}.lora_A.weight") == ("lm_head", "lora_A.weight")
    config = parse(
        target_modules=rf"{decoder}layers\.\d+\.self_attn\.q_proj|{head}",
        rank_pattern={f"^{decoder}layers.3.self_attn.q_proj": 2},
        alpha_pattern={f"^{decoder}layers.3.self_attn.q_proj": 10},
    )
    assert (config.has_target(Q3), config.rank_of(Q3)) == (False, 4)
    config = replace(config, prefixes=prefixes_of(name))
    assert (config.has_target(Q3), config.rank_of(Q3), config.scaling_of(Q3)) == (True, 2, 5)
    assert config.has_target("lm_head")


def test_modules_are_known_by_layer_and_name() -> None:
    assert parse_module_name(Q3) == (3, "q_proj")
    assert parse_module_name("model.layers.3.input_layernorm") == (3, "input_layernorm")
    assert parse_module_name("lm_head") == (WHOLE_MODEL, "lm_head")
    assert parse_module_name("model.layers.3.self_attn.q_norm") == (3, "q_norm")
    assert parse_module_name("model.layers.3.mlp.shared_expert.up_proj") == (3, "up_proj")
    assert parse_module_name("model.layers.3.mlp.gate") == (3, "router")
    assert parse_module_name("model.layers.3.block_sparse_moe.router.layer") == (3, "router")
    assert parse_module_name("model.layers.3.self_attn.gate_proj") == (3, "self_attn.gate_proj")
    assert parse_module_name("model.layers.3.linear_attn.in_proj_qkv") == (3, "linear_attn.in_proj_qkv")
    assert parse_module_name(f"{Q3}.bias") is None
    assert parse_module_name("visual.layers.3.self_attn.q_proj") is None


@pytest.mark.parametrize(
    "tensor",
    [
        "base_model.model.scores.lora_A.weight",
        f"base_model.model.{Q3}.lora_A.bias",
        f"base_model.model.{Q3}.lora_C.weight",
        f"unet.{Q3}.lora_A.weight",
        f"base_model.model.{Q3}.lora_A.weight\n",
        "",
        "../../etc/passwd",
    ],
)
def test_other_tensors_are_refused(tensor: str) -> None:
    with pytest.raises(AdapterError, match="not one of a LoRA adapter"):
        parse_tensor_name("demo", tensor)


@pytest.mark.parametrize(
    "head",
    [
        "score.bias", "score.lora_A.weight", "score.dense.weight", "classifier.weight", "classifier.out_proj.weight",
        "qa_outputs.weight", "v_head.summary.weight", "value_head.weight",
    ],
)  # fmt: skip
def test_other_heads_than_a_plain_score_are_refused_as_that(head: str) -> None:
    with pytest.raises(AdapterError, match=f"brings a classifier, '{head}'"):
        parse_tensor_name("demo", f"base_model.model.{head}")


@pytest.mark.parametrize("name", ["base_model.model.score.weight", "score.weight"])
def test_the_weight_of_a_score_is_the_head(name: str) -> None:
    assert parse_tensor_name("demo", name) == (HEAD, "weight")
