"""The config.json of a ModernBERT with a classification head, as a frozen value. Does not need transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPE = "modernbert"
WEIGHTS = "model.safetensors"
KINDS = ("full_attention", "sliding_attention")
_COUNTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "local_attention": 128,
}
"""Integer fields with transformers' defaults for files that omit them."""
_SWITCHES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
_OLDER_THETAS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
_OTHER_ROTATIONS = {"rope_scaling", "rope_theta", "partial_rotary_factor"}
_PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertSpec:
    """The fields of config.json by their own names, except `theta_by_kind` and `labels`.

    Attributes:
        layer_types: per layer, full or sliding attention (`KINDS`).
        local_attention: twice the number of tokens that a sliding layer attends to on each side of the query.
        theta_by_kind: base of the rotary frequencies per layer kind.
        labels: names of the logits, in order.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    local_attention: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool
    classifier_pooling: str
    layer_types: tuple[str, ...]
    theta_by_kind: Mapping[str, float]
    labels: tuple[str, ...]
    problem_type: str | None


def read_spec(path: str) -> ModernBertSpec | None:
    """Return the spec from a folder's config.json, or None if it is not a standard ModernBERT with one weights file.

    Unexpected values also give None: transformers either supports them or has the better error message.
    """
    try:
        told = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("model_type") != MODEL_TYPE or not Path(path, WEIGHTS).is_file():
        return None
    spec = ModernBertSpec(
        **{name: told.get(name, default) for name, default in _COUNTS.items()},
        **{name: told.get(name, False) for name in _SWITCHES},
        norm_eps=told.get("norm_eps", 1e-5),
        classifier_pooling=told.get("classifier_pooling", "cls"),
        layer_types=_layer_types(told),
        theta_by_kind=_thetas(told),
        labels=_labels(told),
        problem_type=told.get("problem_type"),
    )
    is_gelu = all(told.get(name, "gelu") == "gelu" for name in ("hidden_activation", "classifier_activation"))
    is_plain = is_gelu and told.get("quantization_config") is None and not _OTHER_ROTATIONS & told.keys()
    return spec if is_plain and _is_sound(spec) else None


def _is_sound(spec: ModernBertSpec) -> bool:
    return (
        all(_is_count(getattr(spec, name)) for name in _COUNTS)
        and all(type(getattr(spec, name)) is bool for name in _SWITCHES)
        and _is_number(spec.norm_eps)
        and spec.classifier_pooling in ("cls", "mean")
        and spec.hidden_size % (2 * spec.num_attention_heads) == 0
        and len(spec.layer_types) == spec.num_hidden_layers
        and all(kind in KINDS for kind in spec.layer_types)
        and all(map(_is_number, spec.theta_by_kind.values()))
        and bool(spec.labels)
        and all(isinstance(label, str) for label in spec.labels)
        and spec.problem_type in _PROBLEMS
        # Refused by transformers: a softmax over one logit is constant.
        and (spec.problem_type != "single_label_classification" or len(spec.labels) > 1)
    )


def _layer_types(told: Mapping[str, Any]) -> tuple[str, ...]:
    if told.get("layer_types") is not None:
        return tuple(told["layer_types"]) if isinstance(told["layer_types"], list) else ()
    layers, every = (
        told.get(name, usual) for name, usual in (("num_hidden_layers", 22), ("global_attn_every_n_layers", 3))
    )
    if not _is_count(layers) or not _is_count(every):
        return ()
    return tuple(KINDS[i % every != 0] for i in range(layers))


def _thetas(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary base of each layer kind, from the older or newer fields; None stands for an unknown form."""
    newer = told.get("rope_parameters")
    if newer is None:
        return {kind: told.get(name, usual) for kind, (name, usual) in _OLDER_THETAS.items()}
    if not isinstance(newer, dict) or newer.keys() != set(KINDS):
        return dict.fromkeys(KINDS)
    return {kind: _plain_theta(newer[kind]) for kind in KINDS}


def _plain_theta(rope: object) -> object:
    if not isinstance(rope, dict) or rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return None
    return rope["rope_theta"]


def _labels(told: Mapping[str, Any]) -> tuple[Any, ...]:
    label_by_id = told.get("id2label")
    if label_by_id is None:
        count = told.get("num_labels", 2)
        return tuple(f"LABEL_{i}" for i in range(count)) if _is_count(count) else ()
    if not isinstance(label_by_id, dict):
        return ()
    return tuple(label_by_id.get(str(i)) for i in range(len(label_by_id)))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_number(value: object) -> bool:
    return type(value) is float and 0 < value < 1e12
