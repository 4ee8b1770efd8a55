"""The geometry of a checkpoint that transformers computes, and what is refused before a weight is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.config import EngineConfig
from engine.costs import num_layer_weights, num_step_weights, num_weights
from engine.decoder.model_spec import KvShape, Mixtures
from engine.decoder.spec import DecoderSpec
from engine.errors import CheckpointError
from engine.fallback.spec import FallbackSpec
from engine.loading.contents import check_contents
from engine.loading.spec import read_checkpoint_spec, read_model_spec
from engine.resolve import check
from tests.engine.checkpoint_folder import write_config
from tests.engine.fallback.saved import SIZES, save


def change(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_a_family_of_ours_stays_ours(tmp_path: Path) -> None:
    assert isinstance(read_model_spec(write_config(tmp_path)), DecoderSpec)


def test_geometry_and_modules_are_those_of_the_model(tmp_path: Path) -> None:
    path = str(save(tmp_path, eos_token_id=5))
    spec = read_checkpoint_spec(path)
    assert isinstance(spec, FallbackSpec)
    assert (spec.num_layers, spec.q_size, spec.kv_size, spec.vocab_size, spec.hidden_size) == (2, 32, 16, 60, 32)
    assert (spec.max_position, spec.eos_ids, spec.is_tied, spec.generates) == (128, (5,), False, True)
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 16 * 2
    assert spec.linear_shapes()["model.layers.1.mlp.down_proj"] == (48, 32)
    assert spec.module_shapes()["model.layers.0.self_attn.q_proj.bias"] == (32,)
    assert {name.rpartition(".")[2] for name in spec.linear_shapes()} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert num_weights(spec) == sum(weight.numel() for weight in model.parameters())
    assert num_layer_weights(spec) == num_weights(spec) - 2 * 60 * 32
    assert num_step_weights(spec) == num_weights(spec) - 60 * 32
    check_contents(path, spec)


def test_a_tied_matrix_is_counted_once(tmp_path: Path) -> None:
    spec = read_model_spec(str(save(tmp_path, "CohereForCausalLM", tie_word_embeddings=True)))
    assert spec.is_tied
    assert num_weights(spec) == num_step_weights(spec) == num_layer_weights(spec) + 60 * 32


def test_a_decoder_keeps_its_ends_where_the_whole_model_has_none(tmp_path: Path) -> None:
    """Answers of InternVL and Aya Vision went on to max_tokens if config.json began with a null of the whole."""
    text = {**SIZES, "model_type": "cohere2", "eos_token_id": [5, 7]}
    transformers.AyaVisionConfig(text_config=text).save_pretrained(tmp_path)
    path = change(tmp_path, architectures=["AyaVisionForConditionalGeneration"], eos_token_id=None)
    assert read_model_spec(path).eos_ids == (5, 7)
    assert read_model_spec(change(tmp_path, eos_token_id=9)).eos_ids == (9,)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 128),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 128),
        ({"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "short_factor": [1.0] * 4,
          "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}, 32),
    ],
)  # fmt: skip
def test_the_context_ends_where_angles_would_depend_on_others(
    tmp_path: Path, rope: dict[str, Any], longest: int
) -> None:
    assert read_model_spec(str(save(tmp_path, rope_parameters=rope))).max_position == longest


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"factor": 2.0}, 256),
    ],
)
def test_yarn_lengthens_the_context(tmp_path: Path, rope: dict[str, Any], longest: int) -> None:
    """GLM 4's card adds it to a config.json that keeps the shorter context, of which more could not be asked."""
    path = str(save(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **rope}))
    assert read_model_spec(path).max_position == longest


@pytest.mark.parametrize(("told", "longest"), [(1024, 1024), (64, 128), (None, 128)])
def test_command_r_has_the_longer_context_of_two(tmp_path: Path, told: int | None, longest: int) -> None:
    """Its published config.json has 8,192 positions and a model_max_length of 131,072, which was passed over."""
    path = change(save(tmp_path, "CohereForCausalLM"), model_max_length=told)
    assert read_model_spec(path).max_position == longest


def test_code_that_transformers_has_taken_over_is_not_run(tmp_path: Path) -> None:
    code = tmp_path / "modeling_seed_oss.py"
    code.write_text("raise SystemExit('code of a checkpoint ran')")
    path = change(save(tmp_path), auto_map={"AutoModelForCausalLM": "modeling_seed_oss.SeedOssForCausalLM"})
    assert read_model_spec(path).architecture == "SeedOssForCausalLM"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "has no decoder NobodysForCausalLM"),
        ({"architectures": ["GlmForCausalLM"]}, "model_type 'seed_oss' is not that of GlmForCausalLM"),
        ({"model_type": "nobodys"}, "nobodys"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.zero_point is None"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method is 'mxfp4', supported for gpt-oss only"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
        (
            {
                "model_type": "nobodys",
                "auto_map": {"AutoConfig": "a.NobodysConfig", "AutoModelForCausalLM": "a.SeedOssForCausalLM"},
            },
            r"it requires custom code \(auto_map\), which is never executed",
        ),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"num_attention_heads": "four"}, r"config\.json.*num_attention_heads.*int.*'four'"),
        ({"num_hidden_layers": 0}, "no attention layer"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": math.inf}}, "yarn's factor .* inf"),
        ({"text_config": []}, "text_config must be an object"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = change(save(tmp_path), **fields)
    with pytest.raises(CheckpointError, match=words):
        read_model_spec(path)


@pytest.mark.parametrize(
    ("device", "quantization"), [("cpu", "int8"), ("cpu", "int4"), ("cuda", "fp8"), ("cuda", "int4")]
)
def test_modules_of_any_size_may_be_quantized_since_what_does_not_fit_stays(
    tmp_path: Path, device: str, quantization: str
) -> None:
    path = str(save(tmp_path, hidden_size=36, intermediate_size=42))
    check(EngineConfig(model_path=path, device=device, quantization=quantization), read_model_spec(path))


def test_of_experts_a_step_reads_those_that_are_chosen(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    path = str(save(tmp_path, "Glm4MoeForCausalLM", n_group=1, topk_group=1, **experts))
    spec = read_model_spec(path)
    assert spec.mixtures() == Mixtures(num_layers=1, num_experts=8, chosen=2, inner=16)
    assert num_weights(spec) - num_step_weights(spec) == 60 * 32 + 6 * 3 * 32 * 16
    assert {name: shape for name, shape in spec.module_shapes().items() if ".experts." in name} == {
        "model.layers.1.mlp.experts.gate_up_proj": (8, 32, 2, 16),
        **{f"model.layers.1.mlp.experts.{name}": (8, 32, 16) for name in ("gate_proj", "up_proj")},
        "model.layers.1.mlp.experts.down_proj": (8, 16, 32),
    }
    assert read_model_spec(str(save(tmp_path / "dense"))).mixtures() is None


def test_layers_have_heads_of_their_own_and_may_share_keys(tmp_path: Path) -> None:
    fields = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 20,
    }
    spec = read_model_spec(str(save(tmp_path, "Gemma4ForCausalLM", **fields)))
    assert isinstance(spec, FallbackSpec)
    assert spec.kv == (KvShape(2, 8), KvShape(2, 8), KvShape(2, 16))
    assert [form.window for form in spec.layers] == [20, 20, 0]
    # A layer that has no keys of its own takes those of the last one of its kind that has some.
    assert spec.places == {0: 0, 1: 1, 2: 2, 3: 1, 4: 1, 5: 2}
    assert spec.kv_bytes_per_token(2) == 3 * 2 * 32 * 2
