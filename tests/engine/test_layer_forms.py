from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.decoder.layer_forms import LayerForm
from engine.decoder.reading import read_spec
from engine.decoder.rope import NO_ROPE, RopeSpec
from engine.errors import CheckpointError
from tests.engine.checkpoint_folder import write_config
from tests.engine.test_rope import LONGROPE

QWEN = {"use_sliding_window": True, "sliding_window": 32}


def windows(folder: Path, architecture: str, **changes: Any) -> list[int]:
    path = write_config(folder, architectures=[architecture], num_hidden_layers=4, **changes)
    return [form.window for form in read_spec(path).layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 32}, [0, 0, 0, 0]),
        ("MistralForCausalLM", {"sliding_window": 32}, [32, 32, 32, 32]),
        (
            "MinistralForCausalLM",
            {"sliding_window": 32, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
            [0, 32, 32, 32],
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": False}, [0, 0, 0, 0]),
        ("Qwen2ForCausalLM", QWEN, [0, 0, 0, 0]),
        ("Qwen2ForCausalLM", {**QWEN, "max_window_layers": 0}, [32, 32, 32, 32]),
        ("Qwen3ForCausalLM", {**QWEN, "max_window_layers": 3}, [0, 0, 0, 32]),
        (
            "Qwen3ForCausalLM",
            {**QWEN, "layer_types": ["sliding_attention", "full_attention"] * 2, "max_window_layers": 3},
            [32, 0, 32, 0],
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 32}, [32, 0, 32, 0]),
        ("Gemma3ForCausalLM", {"sliding_window": 32}, [32, 32, 32, 32]),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "sliding_window_pattern": 3}, [32, 32, 0, 32]),
    ],
)
def test_layers_have_the_windows_of_their_family(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(tmp_path, architecture, **changes) == expected


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_a_window_that_is_not_said_is_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    changes = {"use_sliding_window": True, "max_window_layers": 0}
    assert windows(tmp_path, architecture, **changes) == [4096] * 4
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "sliding_window": None}))
    assert not any(form.window for form in read_spec(str(tmp_path)).layers)


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0], "no_rope_layer_interval": 2}, [False, True, True, False]),
    ],
)
def test_some_layers_of_smollm3_do_not_rotate(tmp_path: Path, changes: dict[str, Any], rotated: list[bool]) -> None:
    path = write_config(tmp_path, architectures=["SmolLM3ForCausalLM"], num_hidden_layers=4, **changes)
    assert [form.rope == RopeSpec(theta=2e6) for form in read_spec(path).layers] == rotated
    assert [form.rope != NO_ROPE for form in read_spec(path).layers] == rotated
    window = {"use_sliding_window": True, "sliding_window": 9}
    assert windows(tmp_path, "SmolLM3ForCausalLM", **changes, **window) == [0 if is_one else 9 for is_one in rotated]


def test_no_rope_layers_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no_rope_layers .* 4 layers"):
        windows(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[1, 0])


@pytest.mark.parametrize(
    ("architecture", "changes", "word"),
    [
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of heads of 16"),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor has 1 numbers; 8"),
    ],
)
def test_a_rotation_that_cannot_be_served_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(CheckpointError, match=word):
        windows(tmp_path, architecture, head_dim=16, max_position_embeddings=256, **changes)


def test_longrope_bounds_the_context_by_what_it_was_trained_on(tmp_path: Path) -> None:
    rope = {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 6}, "partial_rotary_factor": 0.75, "head_dim": 16}
    rope["original_max_position_embeddings"] = 64
    path = write_config(tmp_path, architectures=["Phi3ForCausalLM"], max_position_embeddings=256, **rope)
    assert read_spec(path).max_position == 64


def test_what_phi3_was_trained_on_is_never_read_from_the_rope_block(tmp_path: Path) -> None:
    """Its configuration class has a default outside of the block, which wins."""
    config = {"rope_scaling": LONGROPE, "head_dim": 32, "max_position_embeddings": 8192}
    spec = read_spec(write_config(tmp_path, architectures=["Phi3ForCausalLM"], **config))
    assert spec.max_position == 4096
    assert {form.rope.original_max_len for form in spec.layers} == {4096}


def test_layers_said_to_have_a_window_that_is_off_are_refused(tmp_path: Path) -> None:
    """transformers applies it (SmolLM3) or fails (Qwen)."""
    changes = {"sliding_window": 9, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}
    for architecture in ("SmolLM3ForCausalLM", "Qwen3ForCausalLM"):
        with pytest.raises(CheckpointError, match=r"layer_types .* use_sliding_window is false"):
            windows(tmp_path, architecture, **changes)
    assert windows(tmp_path, "SmolLM3ForCausalLM", **{**changes, "layer_types": ["full_attention"] * 4}) == [0] * 4


def test_a_window_that_all_texts_fit_into_is_none() -> None:
    """What is faster without windows is not lost to who says how long texts are."""
    form = LayerForm(rope=NO_ROPE, scale=1.0, window=32)
    assert form.within(33) == form
    assert form.within(32) == form.within(8) == LayerForm(rope=NO_ROPE, scale=1.0)


def test_layers_with_a_window_may_have_a_rotation_of_their_own(tmp_path: Path) -> None:
    """In the fields of Gemma 3's files, and in those that transformers writes today."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_scaling": scaling, "sliding_window_pattern": 2}
    new = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    ours = RopeSpec(theta=1e4), RopeSpec(theta=1e6, kind="linear", factor=8.0)
    for changes in (old, new, {**old, "rope_theta": 1e6, "rope_local_base_freq": 1e4}):
        path = write_config(tmp_path, architectures=["Gemma3ForCausalLM"], num_hidden_layers=4, **changes)
        assert tuple(form.rope for form in read_spec(path).layers) == ours * 2


@pytest.mark.parametrize(
    "layer_types", ["full_attention", ["full_attention"], ["full_attention"] * 3 + ["linear_attention"]]
)
def test_layer_types_that_cannot_be_served_are_named(tmp_path: Path, layer_types: Any) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types .* 4 layers"):
        windows(tmp_path, "Qwen3ForCausalLM", **QWEN, layer_types=layer_types)
