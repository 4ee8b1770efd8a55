"""PEFT's LoRA format: adapter_config.json, and the names of tensors. Standard library only; knows no tensors, no base.

Fields that change what the adapter computes are understood or refused by name; fields of training are passed over.
Source: `LoraConfig` and `get_pattern_key` of huggingface/peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from adapters.errors import AdapterError

_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "inference_mode", "init_lora_weights", "lora_dropout", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config",
})  # fmt: skip
_UNDERSTOOD = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform",
    "layers_pattern", "bias",
})  # fmt: skip
# These initialisations change the base model's own weights, and the saved matrices only fit the changed ones.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?:0|[1-9]\d{0,5})\.[A-Za-z0-9_.]{1,100})\.lora_(?P<half>[AB])\.weight"
)
_MODULE_NAME = re.compile(r"model\.layers\.(?P<layer>\d{1,6})\.(?:self_attn|mlp)\.(?P<module>[a-z_]+_proj)")

_Value = TypeVar("_Value", int, float)

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 256
MAX_PATTERN_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What adapter_config.json says of the computation.

    Attributes:
        rank: of modules that `rank_pattern` does not name.
        alpha: of modules that `alpha_pattern` does not name.
        use_rslora: scaling is alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, 2023).
        rank_pattern, alpha_pattern: regular expressions for the end of a module's name; the first that matches counts.
        target_modules: names or their ends, one regular expression for whole names, or None for all linear modules.
        layers_to_transform: layer indices that a list of `target_modules` is limited to; None for all.
        layers_pattern: names of the list of layers that those indices count in; empty for any.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, given by its full name (`model.layers.0.self_attn.q_proj`)."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return what B A is multiplied by for a module, given by its full name."""
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def has_target(self, module: str) -> bool:
        """Tell whether a linear module of the decoder, given by its full name, is to have an adapter."""
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True
        if not any(module.endswith(f".{target}") for target in self.target_modules):
            return False
        if not self.layers_to_transform:
            return True
        for pattern in self.layers_pattern or (r"[^.]*",):
            match = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\.", module)
            if match:
                return int(match["layer"]) in self.layers_to_transform
        return False


def parse_config(name: str, content: bytes) -> LoraConfig:
    """Parse the bytes of adapter_config.json.

    Raises:
        AdapterError: not JSON, a field is of a wrong type or out of bounds, or asks for something not supported.
    """
    try:
        fields = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise AdapterError(name, "adapter_config.json is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterError(name, "adapter_config.json is not a JSON object")
    if fields.get("peft_type") != "LORA":
        raise AdapterError(name, f"peft_type is {_shown(fields.get('peft_type'))}, and only LORA is supported")
    if fields.get("bias", "none") not in ("none", None):
        raise AdapterError(name, f"bias is {_shown(fields['bias'])}, and only 'none' is supported")
    _refuse_base_changing_init(name, fields.get("init_lora_weights"))
    for key in sorted(set(fields) - _IGNORED - _UNDERSTOOD):
        # PEFT writes every option it knows; one that is off asks for nothing.
        if fields[key] not in (None, False, [], {}, "", 0):
            raise AdapterError(name, f"{key[:100]} is not supported")
    use_rslora = fields.get("use_rslora", False)
    if type(use_rslora) is not bool:
        raise AdapterError(name, "use_rslora is not true or false")
    return LoraConfig(
        rank=_rank(name, "r", fields.get("r", 8)),
        alpha=_alpha(name, "lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=use_rslora,
        rank_pattern={k: _rank(name, f"rank_pattern.{k}", v) for k, v in _patterns(name, fields, "rank_pattern")},
        alpha_pattern={k: _alpha(name, f"alpha_pattern.{k}", v) for k, v in _patterns(name, fields, "alpha_pattern")},
        target_modules=_target_modules(name, fields.get("target_modules")),
        layers_to_transform=_layers(name, fields.get("layers_to_transform")),
        layers_pattern=_layers_pattern(name, fields.get("layers_pattern")),
    )


def parse_tensor_name(name: str, tensor: str) -> tuple[str, str]:
    """Split a tensor's name into the module's full name in the base model and "A" or "B".

    Raises:
        AdapterError: the name is not that of a LoRA matrix of a decoder layer.
    """
    match = _TENSOR_NAME.fullmatch(tensor)
    if match is None:
        raise AdapterError(name, f"tensor {tensor[:200]!r} is not a LoRA matrix of a decoder layer")
    return match["module"], match["half"]


def parse_module_name(module: str) -> tuple[int, str] | None:
    """Split `model.layers.3.self_attn.q_proj` into (3, "q_proj"); None for a module that takes no adapter."""
    match = _MODULE_NAME.fullmatch(module)
    return None if match is None else (int(match["layer"]), match["module"])


def _first_match(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _refuse_base_changing_init(name: str, init: object) -> None:
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterError(
            name,
            f"init_lora_weights {init[:50]!r} changes the base model; convert the adapter to plain LoRA when saving",
        )


def _rank(name: str, field: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise AdapterError(name, f"{field[:300]} is not an integer from 1 to {1 << 16}")
    return value


def _alpha(name: str, field: str, value: object) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e6:  # type: ignore[arg-type]
        raise AdapterError(name, f"{field[:300]} is not a number of at most a million")
    return float(value)  # type: ignore[arg-type]


def _patterns(name: str, fields: dict[str, object], field: str) -> list[tuple[str, object]]:
    value = fields.get(field) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise AdapterError(name, f"{field} is not an object of at most {MAX_PATTERNS} entries")
    for pattern in value:
        _check_regex(name, field, pattern)
    return list(value.items())


def _target_modules(name: str, value: object) -> tuple[str, ...] | str | None:
    if isinstance(value, str) and value:
        if value.lower() == "all-linear":
            return None
        _check_regex(name, "target_modules", value)
        return value
    names = _strings(value)
    if not names or len(names) > MAX_PATTERNS:
        raise AdapterError(name, f"target_modules is neither a string nor a list of 1 to {MAX_PATTERNS} strings")
    # PEFT keeps a set and writes it in any order.
    return tuple(sorted(names))


def _layers(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_PATTERNS or not all(type(item) is int and item >= 0 for item in values):
        raise AdapterError(name, "layers_to_transform is neither a layer index nor a list of them")
    return tuple(values)


def _layers_pattern(name: str, value: object) -> tuple[str, ...]:
    if not value:
        return ()
    patterns = (value,) if isinstance(value, str) else _strings(value)
    if not patterns or len(patterns) > 16:
        raise AdapterError(name, "layers_pattern is neither a string nor a list of at most 16 strings")
    for pattern in patterns:
        _check_regex(name, "layers_pattern", pattern)
    return patterns


def _strings(value: object) -> tuple[str, ...]:
    """Return a list's strings, nothing where it is not a list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ()
    return tuple(value)


def _check_regex(name: str, field: str, pattern: str) -> None:
    """Refuse a regular expression that could take for ever: repeated groups, or many repeats in a row.

    Python's matcher backtracks and cannot be interrupted; with a few repeats of single characters its work on a name
    is a polynomial of low degree.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise AdapterError(name, f"{field} has a pattern longer than {MAX_PATTERN_CHARS} characters")
    unescaped = re.sub(r"\\.", "_", pattern)
    if re.search(r"\)[*+{]", unescaped) or len(re.findall(r"[*+{]", unescaped)) > MAX_PATTERN_REPEATS:
        raise AdapterError(name, f"{field} has a pattern with repeated groups or over {MAX_PATTERN_REPEATS} repeats")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise AdapterError(name, f"{field} has a pattern that is not a regular expression") from None


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _shown(value: object) -> str:
    return repr(value)[:50]
