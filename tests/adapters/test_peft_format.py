from __future__ import annotations

import json
import math
from typing import Any

import pytest

from adapters.errors import AdapterError
from adapters.peft_format import LoraConfig, parse_config
from tests.adapters.handmade import make_config

Q3 = "model.layers.3.self_attn.q_proj"


def parse(**changes: Any) -> LoraConfig:
    return parse_config("demo", json.dumps(make_config(**changes)).encode())


def test_scaling_is_alpha_over_rank_or_over_its_root() -> None:
    assert parse(r=4, lora_alpha=6).scaling_of(Q3) == 1.5
    assert parse(r=4, lora_alpha=6, use_rslora=True).scaling_of(Q3) == 3.0


def test_patterns_give_a_module_its_own_rank_and_alpha_and_the_first_match_counts() -> None:
    config = parse(
        r=4,
        lora_alpha=8,
        rank_pattern={"layers.3.self_attn.q_proj": 2, "q_proj": 16},
        alpha_pattern={r"model\.layers\.\d+\.mlp\.up_proj": 32, "self_attn": 99},
        use_rslora=True,
    )
    assert config.rank_of(Q3) == 2
    assert config.rank_of("model.layers.13.self_attn.q_proj") == 16
    assert config.rank_of("model.layers.3.mlp.up_proj") == 4
    assert config.scaling_of("model.layers.3.mlp.up_proj") == 16
    assert config.scaling_of(Q3) == pytest.approx(8 / math.sqrt(2))


@pytest.mark.parametrize(
    ("changes", "targets", "others"),
    [
        ({"target_modules": ["q_proj", "mlp.up_proj"]}, [Q3, "model.layers.0.mlp.up_proj"], ["x.aq_proj"]),
        ({"target_modules": Q3}, [Q3], ["model.layers.13.self_attn.q_proj"]),
        ({"target_modules": r".*\.(q|v)_proj"}, [Q3], ["model.layers.3.self_attn.k_proj"]),
        ({"target_modules": "all-linear"}, [Q3, "model.layers.0.mlp.down_proj"], []),
        ({"layers_to_transform": [3, 4]}, [Q3], ["model.layers.0.self_attn.q_proj"]),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, ["model.layers.0.self_attn.q_proj"], [Q3]),
        ({"layers_to_transform": [3], "layers_pattern": ["blocks"]}, [], [Q3]),
        ({"layers_to_transform": [0], "target_modules": [Q3, "up_proj"]}, [Q3], ["model.layers.3.mlp.up_proj"]),
        ({"layers_to_transform": [3], "layers_pattern": ["h", r"l\w+s"]}, [Q3], ["model.layers.0.mlp.up_proj"]),
        ({"exclude_modules": ["k_proj", "3.self_attn.q_proj"]}, ["model.layers.0.self_attn.q_proj"], [Q3]),
        ({"exclude_modules": r".*layers\.[12]?\d\..*"}, ["model.layers.30.self_attn.q_proj"], [Q3]),
        ({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}, [Q3], ["model.layers.0.mlp.down_proj"]),
        ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}, [Q3], ["lm_head"]),
    ],
)  # fmt: skip
def test_targets_are_matched_as_peft_matches_them(
    changes: dict[str, Any], targets: list[str], others: list[str]
) -> None:
    config = parse(**changes)
    assert all(config.has_target(module) for module in targets)
    assert not any(config.has_target(module) for module in others)


def test_every_field_that_peft_writes_by_default_is_accepted() -> None:
    peft = pytest.importorskip("peft")
    fields = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    written = json.dumps(fields, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    config = parse_config("demo", written.replace('"PeftType.LORA"', '"LORA"').encode())
    assert (config.rank, config.alpha, config.target_modules) == (8, 8.0, ("q_proj",))


def test_tokens_with_rows_of_their_own_are_those_of_the_embedding_or_of_the_modules_that_are_named() -> None:
    for nothing in (None, [], {}):
        assert parse(trainable_token_indices=nothing).tokens_of("model.embed_tokens") == ()
    config = parse(trainable_token_indices=[7, 3])
    assert config.tokens_of("model.embed_tokens") == (7, 3)
    assert config.tokens_of("lm_head") == ()
    config = parse(trainable_token_indices={"model.embed_tokens": [1], "lm_head": [2, 0]})
    assert config.tokens_of("model.embed_tokens") == (1,)
    assert config.tokens_of("lm_head") == (2, 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": 1}, "use_dora"),
        ({"use_dora": True, "lora_bias": True}, "exclude each other"),
        ({"bias": "some"}, "bias"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"modules_to_save": [""]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        *(
            ({"trainable_token_indices": value}, "trainable_token_indices is neither")
            for value in ([1, 1], [-1], [True], [2**32], [[1]], 7, "7", {"embed_tokens": []}, {"": [1]}, [*range(4097)])
        ),
        ({"exclude_modules": [1]}, "exclude_modules"),
        ({"exclude_modules": "(x"}, "exclude_modules"),
        ({"target_parameters": ["experts.down_proj", "mlp.up.weight"]}, "target_parameters names 'mlp.up.weight'"),
        ({"target_parameters": ["mlp.experts.gate_up_proj_bias"]}, "only gate_up_proj and down_proj of experts"),
        ({"target_parameters": "down_proj"}, "target_parameters is not a list"),
        ({"target_parameters": [3]}, "target_parameters"),
        ({"alora_invocation_tokens": []}, "alora_invocation_tokens is not a list of 1 to 1024"),
        ({"alora_invocation_tokens": [5] * 1025}, "alora_invocation_tokens is not a list of 1 to 1024"),
        ({"alora_invocation_tokens": "[5]"}, "alora_invocation_tokens is not a list"),
        ({"alora_invocation_tokens": [True]}, "alora_invocation_tokens holds what is no token id"),
        ({"alora_invocation_tokens": [-1]}, "alora_invocation_tokens holds what is no token id"),
        ({"alora_invocation_tokens": [1 << 31]}, "alora_invocation_tokens holds what is no token id"),
        ({"alora_invocation_tokens": [5], "use_dora": True}, "use_dora is not supported with alora_invocation_tokens"),
        ({"alora_invocation_tokens": [5], "modules_to_save": ["norm"]}, "modules_to_save is not supported with"),
        ({"alora_invocation_tokens": [5], "bias": "lora_only"}, "bias is not supported with"),
        ({"alora_invocation_tokens": [5], "target_parameters": ["mlp.gate.weight"]}, "target_parameters is not"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"some_future_option": "on"}, "some_future_option"),
        ({"r": 0}, "r is not"),
        ({"r": True}, "r is not"),
        ({"r": 8.0}, "r is not"),
        ({"r": 10**30}, "r is not"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "JSON"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.q_proj"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern has a pattern that is not a regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern has a pattern that is not a regular expression"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "[a-"}, "target_modules"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": {"a": 1}}, "layers_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": "(?P<idx>x)"}, "layers_pattern"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(AdapterError, match=r"^Adapter 'demo' cannot be used: .*\.$") as caught:
        parse(**changes)
    assert word in caught.value.reason


def test_the_tokens_that_activate_an_adapter_are_known() -> None:
    assert parse().invocation_ids == ()
    assert parse(alora_invocation_tokens=None).invocation_ids == ()
    assert parse(alora_invocation_tokens=[5, 0], lora_bias=True).invocation_ids == (5, 0)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_not_a_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(AdapterError, match="JSON"):
        parse_config("demo", content)
