from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from tests.engine.checkpoint_folder import write_config


def test_a_spec_says_what_config_json_says(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (50, 16, 2, 4, 2)
    assert (spec.head_dim, spec.q_size, spec.kv_size, spec.rms_eps) == (4, 16, 8, 1e-5)
    assert (spec.is_tied, spec.max_position, spec.eos_ids) == (False, 128, (2,))
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.has_qk_norm))


def test_a_token_of_the_cache_takes_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path)).kv_bytes_per_token(2) == 2 * 2 * 8 * 2


def test_head_dim_and_kv_heads_follow_from_the_rest_where_they_are_not_said(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, num_key_value_heads=None))
    assert (spec.num_kv_heads, spec.head_dim) == (4, 4)
    assert read_spec(write_config(tmp_path, head_dim=10)).q_size == 40


def test_linear_shapes_are_in_and_out_of_every_module_that_adapters_may_name(tmp_path: Path) -> None:
    shapes = read_spec(write_config(tmp_path)).linear_shapes()
    assert len(shapes) == 2 * 7
    assert shapes["model.layers.0.self_attn.q_proj"] == (16, 16)
    assert shapes["model.layers.1.self_attn.v_proj"] == (16, 8)
    assert shapes["model.layers.1.mlp.down_proj"] == (24, 16)


def test_a_checkpoint_without_an_end_has_none(tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path, eos_token_id=None)).eos_ids == ()


def test_a_sliding_window_does_not_bound_the_context(tmp_path: Path) -> None:
    path = write_config(tmp_path, architectures=["MistralForCausalLM"], sliding_window=32)
    assert read_spec(path).max_position == 128


@pytest.mark.parametrize("architecture", ["LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Gemma3TextModel"])
def test_a_decoder_without_an_output_matrix_makes_vectors_only(tmp_path: Path, architecture: str) -> None:
    spec = read_spec(write_config(tmp_path, architectures=[architecture]))
    assert spec.architecture == architecture.replace("Text", "").replace("Model", "ForCausalLM")
    assert not spec.generates
    assert spec.is_tied


def test_yarn_reaches_as_far_as_it_scales(tmp_path: Path) -> None:
    """Qwen's cards say to add the block, and leave max_position_embeddings what it was."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_spec(write_config(tmp_path, rope_scaling=yarn)).max_position == 512
    assert read_spec(write_config(tmp_path, rope_scaling=yarn, max_position_embeddings=600)).max_position == 600


def test_attention_in_chunks_bounds_the_context_by_the_first(tmp_path: Path) -> None:
    chunks = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 64}
    assert read_spec(write_config(tmp_path, dual_chunk_attention_config=chunks)).max_position == 48


def test_code_that_defines_what_is_known_by_now_is_not_needed(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    spec = read_spec(write_config(tmp_path, architectures=["Phi3ForCausalLM"], auto_map=code))
    assert spec.architecture == "Phi3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures", "None"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures", "exactly one name"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, ["dual_chunk_attention_config", "local_size"]),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, ["auto_map"]),
        ({"auto_map": {"AutoModelForCausalLM": "evil.LlamaForCausalLM"}}, ["auto_map"]),
        ({"auto_map": "evil.Phi3ForCausalLM", "architectures": ["Phi3ForCausalLM"]}, ["auto_map"]),
        ({"quantization_config": {"quant_method": "exl2"}}, ["quantization_config.quant_method", "exl2", "awq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"vocab_size": "50"}, ["vocab_size", "'50'"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"hidden_size": -16}, ["hidden_size", "-16"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 1 << 40}, ["num_hidden_layers"]),
        ({"num_attention_heads": 5, "head_dim": 4}, ["num_attention_heads, 5", "num_key_value_heads, 2"]),
        ({"num_attention_heads": 64}, ["head_dim"]),
        ({"head_dim": 7}, ["7"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        ({"eos_token_id": "stop"}, ["eos_token_id", "stop"]),
        ({"eos_token_id": [1, True]}, ["eos_token_id"]),
        ({"sliding_window": 0, "architectures": ["MistralForCausalLM"]}, ["sliding_window"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        ({"attention_bias": 1}, ["attention_bias"]),
        ({"hidden_activation": "relu", "architectures": ["Gemma2ForCausalLM"]}, ["hidden_act", "relu", "gelu"]),
        ({"use_bidirectional_attention": True, "architectures": ["Gemma3ForCausalLM"]}, ["bidirectional"]),
    ],
)
def test_a_field_that_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(write_config(tmp_path, **changes))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_spec(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(str(tmp_path))
