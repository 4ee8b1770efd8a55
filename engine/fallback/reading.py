"""What transformers makes of a checkpoint that has no family of ours, by config.json and a trial without numbers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adapters.peft_format import parse_module_name
from engine.decoder.ends import eos_ids
from engine.decoder.fields import Fields
from engine.decoder.json_file import read_json
from engine.decoder.layer_forms import LayerForm
from engine.decoder.rope import NO_ROPE
from engine.decoder.stored import Stored, parse_stored, quantization_fields
from engine.errors import CheckpointError
from engine.fallback.probe import on_no_device, try_out
from engine.fallback.spec import GATE_UP, FallbackSpec
from engine.lora import MODULES

DYNAMIC, LONG = "dynamic", "longrope"
"""Rotations whose angles depend on the longest text of a step, beyond a length."""


def read_fallback_spec(folder: Path, fields: Fields, architecture: str) -> FallbackSpec:
    """Return the geometry of a checkpoint whose architecture is none of our families.

    Raises:
        CheckpointError: transformers does not know it as a decoder, or it does more than attend to the tokens before.
    """
    read_stored_layout(folder)
    geometry = _geometry(str(folder), architecture, json.dumps(fields.config))
    return FallbackSpec(**geometry, eos_ids=eos_ids(folder, fields.config, geometry["vocab_size"]))


def read_stored_layout(folder: Path) -> Stored | None:
    """Return how the weights of a checkpoint lie that has them in few bits.

    Raises:
        CheckpointError: in a way that is not read; the message names the field.
    """
    where = f"{folder}/config.json"
    fields = quantization_fields(folder, read_json(folder / "config.json"))
    stored = None if fields is None else parse_stored(fields, where)
    if stored is not None:
        # Numbers have no sizes that are not taken; MXFP4 is no other model's than gpt-oss'.
        stored.check_sizes({}, where)
    return stored


@lru_cache(maxsize=8)
def _geometry(folder: str, architecture: str, _config: str) -> dict[str, Any]:
    """Return all of a `FallbackSpec` but the ends; a start asks for it several times, and each takes seconds."""
    model_class, config = classes_of(folder, architecture)
    model = on_no_device(model_class, config)
    calls = try_out(model, f"{folder}: {architecture}")
    first = calls[0]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight): weight.numel() for weight in (embedding.weight, head.weight)}
    modules = _modules(model)
    num_weights = sum(weight.numel() for weight in model.parameters())
    return {
        "architecture": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "value_dim": first.value_dim,
        "layers": tuple(
            LayerForm(rope=NO_ROPE, scale=call.scale, window=call.window, softcap=call.softcap) for call in calls
        ),
        "is_tied": head.weight is embedding.weight,
        "max_position": _max_position(config, folder),
        "modules": modules,
        "gate_up_size": next((shape[-1] for name, shape in modules.items() if name.endswith(f".{GATE_UP}")), 0),
        "num_weights": num_weights,
        "num_layer_weights": num_weights - sum(ends.values()),
    }


def classes_of(folder: str, architecture: str) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return what transformers makes of a checkpoint: the class of the model and its configuration.

    Raises:
        CheckpointError: it knows none that goes on with a text and lets others do the attention.
    """
    known = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(names)}
    if architecture not in known:
        raise CheckpointError(f"{folder}/config.json: transformers {transformers.__version__} has no {architecture}.")
    model_class: type[PreTrainedModel] = getattr(transformers, architecture)
    if not model_class._supports_attention_backend:
        raise CheckpointError(f"{folder}: {architecture} is not served: its attention cannot be done by another.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"{folder}/config.json: {_told(error)}") from error
    if type(config) is not model_class.config_class or config.get_text_config() is not config:
        raise CheckpointError(f"{folder}/config.json: model_type {config.model_type!r} is not that of {architecture}.")
    return model_class, config


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _max_position(config: PretrainedConfig, folder: str) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise CheckpointError(f"{folder}/config.json: max_position_embeddings must be an integer, it is {longest!r}.")
    told = getattr(config, "rope_parameters", None) or {}
    for rope in [told, *(value for value in told.values() if isinstance(value, dict))]:
        if rope.get("rope_type") in (DYNAMIC, LONG):
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


def _modules(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        at = parse_module_name(name)
        if type(module) is nn.Linear and at is not None and at[1] in (*MODULES, GATE_UP):
            shapes[name] = (module.in_features, module.out_features)
            if module.bias is not None:
                shapes[f"{name}.bias"] = (module.out_features,)
    return shapes
