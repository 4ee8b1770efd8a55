from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.decoder.families import FAMILIES, QWEN3_VL_MOE
from engine.decoder.reading import read_spec
from engine.decoder.scales import Scales
from tests.engine.checkpoint_folder import write_config


@pytest.mark.parametrize(
    ("architecture", "config", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen2ForCausalLM", {"attention_bias": False}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_family(
    tmp_path: Path, architecture: str, config: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    spec = read_spec(write_config(tmp_path, architectures=[architecture], **config))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases


def test_some_normalise_queries_and_keys() -> None:
    named = [name for name, family in FAMILIES.items() if family.has_qk_norm]
    dense = ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"]
    assert named == [*dense, "OlmoeForCausalLM", "Qwen3MoeForCausalLM", QWEN3_VL_MOE]


def test_what_gemma_leaves_unsaid_is_told_by_its_row(tmp_path: Path) -> None:
    fields = {"architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": None}
    spec = read_spec(write_config(tmp_path, **fields))
    assert spec.is_tied
    assert spec.activation == "gelu"
    assert spec.scales == Scales(scores=256**-0.5, embedding=4.0, score_softcap=50.0, logit_softcap=30.0)
    assert {(form.scale, form.softcap) for form in spec.layers} == {(1 / 16, 50.0)}
    norms = {name.rpartition(".")[2] for name in spec.module_shapes() if name.endswith("norm")}
    around_mlp = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    assert norms == {"norm", "input_layernorm", "post_attention_layernorm", *around_mlp}


def test_gemma_3_caps_no_scores(tmp_path: Path) -> None:
    """The field is in its configuration class, but transformers does not use it."""
    fields = {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    spec = read_spec(write_config(tmp_path, **fields))
    assert spec.scales.logit_softcap == 30.0
    assert {form.softcap for form in spec.layers} == {0.0}


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name != QWEN3_VL_MOE])
def test_an_omitted_epsilon_is_that_of_the_configuration_class(architecture: str) -> None:
    assert FAMILIES[architecture].eps == getattr(transformers, architecture).config_class().rms_norm_eps
