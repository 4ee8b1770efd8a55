"""ModernBERT with a classification head: its config.json as a frozen value, and token ids to logits, on the CPU.

Gives the same numbers as transformers in float32, whose own module takes 0.1 GB more memory to import.
Source: Warner et al., 2024, arXiv 2412.13663.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from deployments.classifiers.sequence_window import labels_of
from engine.decoder.fields import Fields, check_fields
from engine.decoder.json_file import read_json
from engine.errors import CheckpointError

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
_SUPPORTED = {
    "model_type": (MODEL_TYPE,),
    "hidden_activation": ("gelu", None),
    "classifier_activation": ("gelu", None),
    "classifier_pooling": ("cls", "mean", None),
    "problem_type": ("regression", "single_label_classification", "multi_label_classification", None),
    **dict.fromkeys(("quantization_config", "rope_scaling", "rope_theta", "partial_rotary_factor"), (None,)),
}


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
    file = Path(path, "config.json")
    try:
        return _spec(Fields(read_json(file), str(file))) if Path(path, WEIGHTS).is_file() else None
    except CheckpointError:
        return None


def _spec(fields: Fields) -> ModernBertSpec | None:
    check_fields(fields.config, _SUPPORTED, fields.where)
    told: Mapping[str, Any] = fields.config
    counts: dict[str, Any] = {name: fields.count(name, default) for name, default in _COUNTS.items()}
    spec = ModernBertSpec(
        **counts,
        **{name: fields.switch(name) for name in _SWITCHES},
        norm_eps=fields.positive("norm_eps", 1e-5),
        classifier_pooling=told.get("classifier_pooling") or "cls",
        layer_types=_layer_types(fields),
        theta_by_kind=_thetas(fields),
        labels=labels_of(fields),
        problem_type=told.get("problem_type"),
    )
    is_sound = (
        spec.hidden_size % (2 * spec.num_attention_heads) == 0
        and len(spec.layer_types) == spec.num_hidden_layers
        and all(kind in KINDS for kind in spec.layer_types)
        and spec.theta_by_kind.keys() == set(KINDS)
        # Refused by transformers: a softmax over one logit is constant.
        and (spec.problem_type != "single_label_classification" or len(spec.labels) > 1)
    )
    return spec if is_sound else None


def _layer_types(fields: Fields) -> tuple[str, ...]:
    told = fields.config.get("layer_types")
    if told is not None:
        return tuple(told) if isinstance(told, list) else ()
    every = fields.count("global_attn_every_n_layers", 3)
    return tuple(KINDS[i % every != 0] for i in range(fields.count("num_hidden_layers", _COUNTS["num_hidden_layers"])))


def _thetas(fields: Fields) -> dict[str, float]:
    """Return the rotary base of each layer kind, from the older or newer fields, without those of an unknown form."""
    newer = fields.config.get("rope_parameters")
    if newer is None:
        return {kind: fields.positive(name, usual) for kind, (name, usual) in _OLDER_THETAS.items()}
    ropes = newer if isinstance(newer, dict) else {}
    return {
        kind: Fields(rope, f"{fields.where}.rope_parameters.{kind}").positive("rope_theta", None)
        for kind, rope in ropes.items()
        if isinstance(rope, dict) and rope.keys() == {"rope_type", "rope_theta"} and rope["rope_type"] == "default"
    }


def load(path: str, spec: ModernBertSpec, dtype: torch.dtype = torch.float32) -> ModernBertClassifier:
    """Load the classifier from a folder in a dtype to compute in, ignoring tensors that it does not use.

    Raises:
        CheckpointError: the file is corrupt, or a tensor is missing or has the wrong shape.
    """
    try:
        tensors = load_file(os.path.join(path, WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a classifier's checkpoint: {error}") from error
    shapes = _shapes(spec)
    check_whole(path, [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape])
    return ModernBertClassifier(spec, {name: tensors[name].to(dtype) for name in shapes})


def check_whole(path: str, lacking: Collection[str]) -> None:
    """Refuse a checkpoint that lacks tensors.

    Raises:
        CheckpointError: tensors are lacking; the message has the first of their names.
    """
    if lacking:
        raise CheckpointError(
            f"{path}: the checkpoint lacks {min(lacking)} in the right shape ({len(lacking)} tensors in all)"
        )


class ModernBertClassifier:
    """The encoder and its head.

    Args:
        tensors: all of one dtype, by their names in the checkpoint; must be complete.
    """

    def __init__(self, spec: ModernBertSpec, tensors: Mapping[str, Tensor]) -> None:
        self._spec = spec
        self._tensors = tensors

    def logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits [rows, labels] in the dtype of the tensors.

        Args:
            input_ids: [rows, tokens] int64, padded.
            attention_mask: [rows, tokens], 1 for tokens and 0 for padding.
        """
        hidden = self._encoded(input_ids, attention_mask.bool())  # [rows, tokens, hidden]
        if self._spec.classifier_pooling == "cls":
            pooled = hidden[:, 0]
        else:
            total = (hidden.float() * attention_mask[..., None]).sum(1)
            pooled = (total / attention_mask.sum(1, keepdim=True)).to(hidden.dtype)
        dense = functional.gelu(self._linear("head.dense", pooled))
        return self._linear("classifier", self._norm("head.norm", dense))

    def _encoded(self, input_ids: Tensor, is_token: Tensor) -> Tensor:
        spec, position = self._spec, torch.arange(input_ids.shape[1])
        kinds = set(spec.layer_types)
        mask_by_kind = {kind: _mask(spec, kind, is_token, position) for kind in kinds}
        embedded = functional.embedding(input_ids, self._tensors["model.embeddings.tok_embeddings.weight"])
        turns_by_kind = {kind: _turns(spec, kind, position).to(embedded.dtype) for kind in kinds}
        hidden = self._norm("model.embeddings.norm", embedded)
        for i, kind in enumerate(spec.layer_types):
            layer = f"model.layers.{i}"
            # The first layer's input has already been normalized by the embedding norm.
            normed = self._norm(f"{layer}.attn_norm", hidden) if i else hidden
            hidden = hidden + self._attended(f"{layer}.attn", normed, mask_by_kind[kind], turns_by_kind[kind])
            value, gate = self._linear(f"{layer}.mlp.Wi", self._norm(f"{layer}.mlp_norm", hidden)).chunk(2, dim=-1)
            hidden = hidden + self._linear(f"{layer}.mlp.Wo", functional.gelu(value) * gate)
        return self._norm("model.final_norm", hidden)

    def _attended(self, name: str, hidden: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
        # [rows, tokens, 3 * hidden] -> three of [rows, heads, tokens, head_dim]
        qkv = self._linear(f"{name}.Wqkv", hidden).unflatten(-1, (3, self._spec.num_attention_heads, -1))
        query, key, value = qkv.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, attn_mask=mask
        )
        return self._linear(f"{name}.Wo", mixed.transpose(1, 2).flatten(-2))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        return functional.layer_norm(x, weight.shape, weight, bias, self._spec.norm_eps)


def _shapes(spec: ModernBertSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    norms = ["model.embeddings.norm", "model.final_norm", "head.norm"]
    # rows, columns, has_bias
    linears = {
        "head.dense": (hidden, hidden, spec.classifier_bias),
        "classifier": (len(spec.labels), hidden, True),
    }
    for i in range(spec.num_hidden_layers):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.attn_norm", f"{layer}.mlp_norm"] if i else [f"{layer}.mlp_norm"]
        linears |= {
            f"{layer}.attn.Wqkv": (3 * hidden, hidden, spec.attention_bias),
            f"{layer}.attn.Wo": (hidden, hidden, spec.attention_bias),
            f"{layer}.mlp.Wi": (2 * inner, hidden, spec.mlp_bias),
            f"{layer}.mlp.Wo": (hidden, inner, spec.mlp_bias),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.tok_embeddings.weight": (spec.vocab_size, hidden)}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,)} | ({f"{name}.bias": (hidden,)} if spec.norm_bias else {})
    for name, (rows, columns, has_bias) in linears.items():
        shapes |= {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if has_bias else {})
    return shapes


def _mask(spec: ModernBertSpec, kind: str, is_token: Tensor, position: Tensor) -> Tensor:
    """Return the attention mask, bool [rows, 1, queries or 1, keys]; True means attend."""
    mask = is_token[:, None, None, :]  # [rows, 1, 1, keys]
    if kind == "full_attention":
        return mask
    reach: int = spec.local_attention // 2
    distance = (position[:, None] - position).abs()
    # Every position attends to itself, so that padding rows are never fully masked, which would give NaN.
    return mask & (distance <= reach) | (distance == 0)


def _turns(spec: ModernBertSpec, kind: str, position: Tensor) -> Tensor:
    """Return the rotary embedding's cosines and sines, [2, tokens, head_dim]."""
    head_dim = spec.hidden_size // spec.num_attention_heads
    theta = spec.theta_by_kind[kind]
    angle = position[:, None] / theta ** (torch.arange(0, head_dim, 2) / head_dim)  # [tokens, head_dim / 2]
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns.unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
