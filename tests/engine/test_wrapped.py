from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.decoder.reading import UnknownArchitectureError, read_spec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from tests.engine.checkpoint_folder import CONFIG, write_config

GEMMA, LLAVA, MISTRAL = (f"{name}ForConditionalGeneration" for name in ("Gemma3", "Llava", "Mistral3"))
TEXT = {name: value for name, value in CONFIG.items() if name not in ("architectures", "tie_word_embeddings")}
NOT_BESIDE = dict.fromkeys(CONFIG)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def spec_of(folder: Path, wrapper: str, text: object, **beside: Any) -> DecoderSpec:
    return read_spec(write_config(folder, **NOT_BESIDE | {"architectures": [wrapper], "text_config": text} | beside))


@pytest.mark.parametrize(
    "model_type",
    ["gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"],
)
def test_what_is_left_out_is_what_transformers_takes_it_for(tmp_path: Path, model_type: str) -> None:
    usual = AutoConfig.for_model(model_type)
    spec = spec_of(tmp_path, LLAVA, {"model_type": model_type})
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.num_heads) == (
        usual.vocab_size,
        usual.hidden_size,
        usual.intermediate_size,
        usual.num_hidden_layers,
        usual.num_attention_heads,
    )
    head_dim = getattr(usual, "head_dim", None) or usual.hidden_size // usual.num_attention_heads
    assert (spec.num_kv_heads, spec.head_dim) == (usual.num_key_value_heads, head_dim)
    assert (spec.rms_eps, spec.max_position) == (usual.rms_norm_eps, usual.max_position_embeddings)
    assert spec.is_tied is getattr(usual, "tie_word_embeddings", False)
    if model_type != "gemma3_text":
        assert spec.layers[0].rope.theta == usual.rope_parameters["rope_theta"]
    window = usual.sliding_window if model_type in ("gemma3_text", "mistral") else 0
    assert spec.layers[0].window == window


def test_gemma_is_read_by_what_its_files_say(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of(tmp_path, GEMMA, text, eos_token_id=[1, 106])
    assert (spec.architecture, spec.eos_ids, spec.is_tied) == ("Gemma3ForCausalLM", (1, 106), True)
    assert (spec.vocab_size, spec.q_size, spec.kv_size, spec.num_layers) == (262208, 2048, 1024, 34)
    local, whole = spec.layers[4], spec.layers[5]
    assert (local.window, local.rope.kind, local.rope.theta, local.scale) == (1024, "default", 1e4, 1 / 16)
    assert (whole.window, whole.rope.kind, whole.rope.factor, whole.rope.theta) == (0, "linear", 8.0, 1e6)


@pytest.mark.parametrize(("wrapper", "architecture"), [(GEMMA, "Gemma3"), (LLAVA, "Llama"), (MISTRAL, "Mistral")])
def test_a_text_without_a_type_is_of_the_usual_one(tmp_path: Path, wrapper: str, architecture: str) -> None:
    assert spec_of(tmp_path, wrapper, TEXT).architecture == f"{architecture}ForCausalLM"


@pytest.mark.parametrize("at_top", [False, True])
def test_a_few_fields_stand_in_the_text_or_beside_it(tmp_path: Path, at_top: bool) -> None:
    moved = {"eos_token_id": 7, "quantization_config": AWQ, "tie_word_embeddings": True}
    text = {**TEXT, "eos_token_id": None, "hidden_size": 256, "intermediate_size": 256}
    spec = spec_of(tmp_path, MISTRAL, text if at_top else text | moved, **moved if at_top else {})
    assert (spec.eos_ids, spec.is_tied) == ((7,), True)
    assert isinstance(spec.stored, StoredInt4)


@pytest.mark.parametrize(("text", "beside"), [(False, True), (True, False), (False, None), (None, False)])
def test_an_output_matrix_that_somebody_knows_of_is_there(
    tmp_path: Path, text: bool | None, beside: bool | None
) -> None:
    """transformers writes true beside the text of a Mistral 3 that has such a matrix."""
    told = {**TEXT, "model_type": "gemma3_text", "tie_word_embeddings": text}
    assert not spec_of(tmp_path, GEMMA, told, tie_word_embeddings=beside).is_tied


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "text_config must be an object"),
        ({**TEXT, "model_type": []}, "text_config.model_type"),
        ({**TEXT, "vocab_size": "50"}, "text_config: vocab_size"),
        ({**TEXT, "use_bidirectional_attention": True}, "bidirectional"),
        ({**TEXT, "quantization_config": {"quant_method": "exl2"}}, "exl2"),
    ],
)
def test_a_text_that_cannot_be_served_is_refused_by_name(tmp_path: Path, text: object, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(tmp_path, MISTRAL, text)
    assert words in str(caught.value)


def test_a_text_of_another_type_is_left_to_transformers(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=MISTRAL):
        spec_of(tmp_path, MISTRAL, {**TEXT, "model_type": "ministral3"})
