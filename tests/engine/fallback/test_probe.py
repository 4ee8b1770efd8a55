"""What a model asks of attention is found out without a number of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import transformers

from engine.errors import CheckpointError
from engine.fallback.probe import AttentionCall, Tried, try_out
from tests.engine.fallback.saved import config_of

MIXED = ["sliding_attention", "full_attention"]


def tried(architecture: str, **fields: Any) -> list[AttentionCall]:
    return tried_whole(architecture, **fields).calls


def tried_whole(architecture: str, **fields: Any) -> Tried:
    model_class = getattr(transformers, architecture)
    return try_out(model_class, config_of(architecture, **fields), architecture)


def test_linear_modules_are_found_where_they_see_each_token_once() -> None:
    """Not those of experts, each of which sees some tokens only."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    found = tried_whole("Glm4MoeForCausalLM", **experts, topk_group=1, first_k_dense_replace=1).linears
    assert {name.removeprefix("model.layers.1.") for name in found if name.startswith("model.layers.1.")} == {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_heads_and_scale_are_what_the_layers_compute_with() -> None:
    for layer, call in enumerate(tried("SeedOssForCausalLM")):
        assert (call.layer, call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) == (layer, 4, 2, 8, 8)
        assert (call.scale, call.window, call.softcap) == (8**-0.5, 0, 0.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("Cohere2ForCausalLM", {"sliding_window": 20, "layer_types": MIXED}, [20, 0]),
        ("Exaone4ForCausalLM", {"sliding_window": 7, "layer_types": MIXED}, [7, 0]),
        ("Starcoder2ForCausalLM", {"sliding_window": 33}, [33, 33]),
        ("Starcoder2ForCausalLM", {"sliding_window": None}, [0, 0]),
    ],
)
def test_windows_are_seen_by_what_masks_hide(architecture: str, fields: dict[str, Any], windows: list[int]) -> None:
    assert [call.window for call in tried(architecture, **fields)] == windows


def test_caps_and_values_shorter_than_keys_are_seen() -> None:
    capped = tried("Gemma2ForCausalLM", attn_logit_softcapping=12.0, query_pre_attn_scalar=16)
    assert {(call.softcap, call.scale) for call in capped} == {(12.0, 0.25)}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    calls = tried("MiniCPM3ForCausalLM", num_key_value_heads=4, **latent)
    assert {(call.num_kv_heads, call.head_dim, call.value_dim) for call in calls} == {(4, 12, 6)}


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("BertLMHeadModel", {}, "neither causal nor a causal sliding window"),
        ("Llama4ForCausalLM", {"num_local_experts": 2, "attention_chunk_size": 16}, "neither causal nor"),
        ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, "an unsupported argument, s_aux"),
        ("DiffLlamaForCausalLM", {}, "a layer calls attention more than once"),
        ("MambaForCausalLM", {}, "it has no attention layer"),
        ("BloomForCausalLM", {}, "transformers cannot replace its attention"),
        ("MptForCausalLM", {}, "transformers cannot replace its attention"),
        ("MarianForCausalLM", {"d_model": 32, "decoder_layers": 2}, "cannot be told the positions"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        tried(architecture, **fields)


def test_attention_that_has_no_place_for_another_is_refused_as_such() -> None:
    """The whole reason was the name of the probe, which is none of Falcon's kinds of attention."""
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
    with pytest.raises(CheckpointError, match="some/falcon is not served: transformers cannot replace its attention"):
        try_out(transformers.FalconForCausalLM, config, "some/falcon")


def test_no_package_is_advised_for_what_is_only_traced() -> None:
    """What transformers says goes past pytest, to the standard error of a process of its own."""
    code = (
        "import transformers; from tests.engine.fallback.test_probe import tried;"
        "tried('Qwen3NextForCausalLM', layer_types=['linear_attention', 'full_attention'], num_experts=2,"
        " num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "falling back" not in run.stderr
