"""Reads the geometry of a fallback model from its config.json and a trace on the meta device."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adapters.experts import EXPERTS
from adapters.tensor_names import WHOLE_MODEL, parse_module_name
from engine.decoder.ends import eos_ids
from engine.decoder.fields import Fields
from engine.decoder.json_file import read_json
from engine.decoder.layer_forms import LayerForm
from engine.decoder.model_spec import KvShape
from engine.decoder.rope import NO_ROPE, RopeSpec
from engine.decoder.stored import Stored, stored_of
from engine.errors import CheckpointError
from engine.fallback.probe import AttentionCall, try_out
from engine.fallback.spec import UNCALLED, FallbackSpec
from engine.loading.contents import opened
from engine.loading.names import HEAD

DYNAMIC, LONG = "dynamic", "longrope"
"""Rotary embeddings whose angles depend on the longest sequence of a step, beyond some length."""
YARN = "yarn"
"""A rotary embedding that lengthens the context by its factor."""
MAX_FACTOR = 1e12
COMMAND_R = "cohere"
"""Model type whose config.json may have the context as `model_max_length`, beside a shorter one."""


def read_fallback_spec(folder: Path, fields: Fields, architecture: str) -> FallbackSpec:
    """Return the geometry of a checkpoint whose architecture is not in `FAMILIES`.

    Raises:
        CheckpointError: transformers has no such decoder, or its attention is not plain causal or sliding-window.
    """
    read_stored_layout(folder)
    geometry = _geometry(str(folder), architecture, json.dumps(fields.config))
    text = fields.config.get("text_config")
    told = {name: value for name, value in fields.config.items() if value is not None}
    told = {**text, **told} if isinstance(text, Mapping) else told
    return FallbackSpec(**geometry, eos_ids=eos_ids(folder, told, geometry["vocab_size"]))


def read_stored_layout(folder: Path) -> Stored | None:
    """Return the layout of a checkpoint's quantized weights, None if not quantized.

    Raises:
        CheckpointError: the layout is not supported; the message names the field.
    """
    where = f"{folder}/config.json"
    stored = stored_of(folder, read_json(folder / "config.json"), where)
    if stored is not None:
        # Weights are dequantized, so any size works; this only refuses MXFP4, which is supported for gpt-oss alone.
        stored.check_sizes({}, where)
    return stored


@lru_cache(maxsize=8)
def _geometry(folder: str, architecture: str, _config: str) -> dict[str, Any]:
    """Return all of a `FallbackSpec` but the EOS ids. Cached: startup asks several times, and a trace takes seconds."""
    model_class, config, _ = classes_of(folder, architecture)
    model, calls, states, mixtures, linears, experts = try_out(model_class, config, f"{folder}: {architecture}")
    modules = _modules(model, linears)
    own = [call for call in calls if call.source == call.layer]
    place_by_layer = {call.layer: place for place, call in enumerate(own)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight): weight.numel() for weight in (embedding.weight, head.weight)}
    num_weights = sum(weight.numel() for weight in model.parameters())
    return {
        "architecture": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_heads": max(call.num_heads for call in calls),
        "num_kv_heads": max(call.num_kv_heads for call in calls),
        "head_dim": max(call.head_dim for call in calls),
        "layers": tuple(
            LayerForm(rope=_rope(call), scale=call.scale, window=call.window, softcap=call.softcap) for call in own
        ),
        "is_tied": head.weight is embedding.weight,
        "max_position": _max_position(config, folder),
        "modules": modules,
        "num_weights": num_weights,
        "num_layer_weights": num_weights - sum(ends.values()),
        "kv": tuple(KvShape(call.num_kv_heads, call.head_dim) for call in own),
        "places": {call.layer: place_by_layer[call.source] for call in calls},
        "depth": config.num_hidden_layers,
        "mixed": mixtures,
        "expert_modules": tuple(filter(EXPERTS.fullmatch, experts)),
        "states": states.form_by_key,
        "state_modules": tuple(states.modules),
        "rotating_modules": tuple(call.rotation.module for call in calls if call.rotation is not None),
    }


def classes_of(folder: str, architecture: str) -> tuple[type[PreTrainedModel], PretrainedConfig, bool]:
    """Return a checkpoint's decoder class, its configuration, and whether it is part of a larger (vision) model.

    Raises:
        CheckpointError: transformers has no causal LM class for it.
    """
    where = f"{folder}/config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers would advise an option that does not exist here.
        is_code = "trust_remote_code" in str(error)
        reason = "it requires custom code (auto_map), which is never executed." if is_code else _told(error)
        raise CheckpointError(f"{where}: {reason}") from error
    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise CheckpointError(f"{where}: text_config must be an object, it is {text!r}.")
    is_part = text is not config
    of_type = _as_tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type, ()))
    # Made for its own code, a checkpoint may have another name for what transformers computes: PhiMoEForCausalLM.
    is_of_type = architecture.lower() == f"{text.model_type.replace('_', '')}forcausallm"
    name = next(iter(of_type), None) if is_part or is_of_type else architecture
    if name not in {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(names)}:
        what = f"text decoder for {architecture}" if is_part else f"decoder {architecture}"
        raise CheckpointError(
            f"{where}: transformers {transformers.__version__} has no {what}. Classifiers are served as `safety`, "
            "cross-encoders as `rerankers`."
        )
    model_class: type[PreTrainedModel] = getattr(transformers, name)
    if name not in of_type and type(text) is not model_class.config_class:
        raise CheckpointError(f"{where}: model_type {text.model_type!r} is not that of {name}.")
    if is_part and (names := _names(Path(folder))):
        # The configurations of the whole and of the part may disagree.
        text.tie_word_embeddings = HEAD not in names
    return model_class, text, is_part


def _names(folder: Path) -> Collection[str]:
    """Return the names of a checkpoint's tensors; empty if its files are missing or broken."""
    try:
        with opened(folder) as tensors:
            return list(tensors)
    except CheckpointError:
        return ()


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _max_position(config: PretrainedConfig, folder: str) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise CheckpointError(f"{folder}/config.json: max_position_embeddings must be an integer, it is {longest!r}.")
    told = getattr(config, "rope_parameters", None) or {}
    lengths, bounds = [longest], []
    for rope in [told, *(value for value in told.values() if isinstance(value, dict))]:
        original = rope.get("original_max_position_embeddings") or longest
        if rope.get("rope_type") == YARN and (factor := rope.get("factor")) is not None:
            lengths.append(_lengthened(original, factor, folder))
        elif rope.get("rope_type") in (DYNAMIC, LONG):
            bounds.append(original)
    if config.model_type == COMMAND_R and isinstance(length := getattr(config, "model_max_length", None), int):
        lengths.append(length)
    return min([max(lengths), *bounds])


def _lengthened(original: int, factor: Any, folder: str) -> int:
    if not isinstance(factor, int | float) or not 0 < factor < MAX_FACTOR:
        raise CheckpointError(f"{folder}/config.json: yarn's factor must be a positive number, it is {factor!r}.")
    return int(factor * original)


def _rope(call: AttentionCall) -> RopeSpec:
    """Return which dimensions of a head rotate; the angles are the model's."""
    return NO_ROPE if call.rotation is None else replace(NO_ROPE, fraction=call.rotation.dim / call.head_dim)


def _modules(model: PreTrainedModel, linears: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the linear modules that take an adapter and their biases, as `FallbackSpec.modules`."""
    stay_wide = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in linears:
        at, module = parse_module_name(name), model.get_submodule(name)
        # The decoder leaves modules of another dtype to transformers.
        is_plain = module.weight.dtype == model.dtype and not any(part in name for part in stay_wide)
        if at is None or at[0] == WHOLE_MODEL or not is_plain or name.endswith(UNCALLED):
            continue
        shapes[name] = (module.in_features, module.out_features)
        if module.bias is not None:
            shapes[f"{name}.bias"] = (module.out_features,)
    return shapes
