"""What is read of a ModernBERT's config.json against what transformers reads, in the forms that there have been."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoConfig, ModernBertConfig

from deployments.classifiers.modern_bert import ModernBertSpec, read_spec
from tests.architecture.source_tree import ROOT

OTHER_NAMES = {"theta_by_kind", "labels", "layer_types"}
PLAIN = {"rope_type": "default", "rope_theta": 5e3}


def write(folder: Path, told: dict[str, object]) -> ModernBertSpec | None:
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text(json.dumps({"model_type": "modernbert", **told}))
    return read_spec(str(folder))


def assert_as_by_transformers(spec: ModernBertSpec | None, folder: Path) -> None:
    assert spec is not None
    theirs = AutoConfig.from_pretrained(folder)
    for field in dataclasses.fields(spec):
        if field.name not in OTHER_NAMES:
            assert getattr(spec, field.name) == getattr(theirs, field.name), field.name
    assert list(spec.layer_types) == theirs.layer_types
    for kind in set(spec.layer_types):
        assert theirs.rope_parameters[kind] == {"rope_type": "default", "rope_theta": spec.theta_by_kind[kind]}
    assert dict(enumerate(spec.labels)) == theirs.id2label


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"num_hidden_layers": 7, "global_attn_every_n_layers": 2, "global_rope_theta": 1e5, "local_rope_theta": 1e3},
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}, "classifier_pooling": "mean"},
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_labels": 3},
        {"id2label": {"1": "b", "0": "a"}, "label2id": {"a": 0, "b": 1}, "problem_type": "regression"},
        {"id2label": {"0": "score"}, "norm_bias": True, "mlp_bias": True, "norm_eps": 1e-6, "local_attention": 64},
    ],
)
def test_every_form_says_what_transformers_reads_in_it(told: dict[str, object], tmp_path: Path) -> None:
    assert_as_by_transformers(write(tmp_path, told), tmp_path)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    config = ModernBertConfig(num_hidden_layers=5, id2label={0: "x", 1: "y", 2: "z"}, attention_bias=True)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert_as_by_transformers(read_spec(str(tmp_path)), tmp_path)


def test_the_bundled_guard_is_read() -> None:
    folder = ROOT / "models" / "guard"
    assert_as_by_transformers(read_spec(str(folder)), folder)


@pytest.mark.parametrize(
    "told",
    [
        {"model_type": "bert"},
        {"hidden_activation": "relu"},
        {"classifier_activation": "relu"},
        {"classifier_activation": ["gelu"]},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_type": "linear"}}},
        {"rope_parameters": {"full_attention": PLAIN}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
        {"num_hidden_layers": 1, "layer_types": ["another"]},
        {"global_attn_every_n_layers": 0},
        {"hidden_size": "768"},
        {"hidden_size": 100, "num_attention_heads": 3},
        {"mlp_bias": 1},
        {"norm_eps": None},
        {"classifier_pooling": "max"},
        {"num_labels": 0},
        {"id2label": ["a"]},
        {"id2label": {"1": "a", "2": "b"}},
        {"id2label": {}},
        {"id2label": {"0": "a"}, "problem_type": "single_label_classification"},
        {"problem_type": "another"},
        # The weights alone are not the numbers: their scales were passed over.
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_what_is_not_as_published_is_left_to_transformers(told: dict[str, object], tmp_path: Path) -> None:
    assert write(tmp_path, told) is None


def test_a_folder_without_a_file_that_can_be_read_is_left_to_transformers(tmp_path: Path) -> None:
    assert read_spec(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("[1]")
    assert read_spec(str(tmp_path)) is None
    assert write(tmp_path, {}) is not None
    (tmp_path / "model.safetensors").unlink()
    assert read_spec(str(tmp_path)) is None
