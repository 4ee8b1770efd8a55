"""PEFT's adapter_config.json of LoRA. Standard library only; knows no tensors and no base.

Fields that change what the adapter computes are supported or refused by name; training fields are ignored.
Source: `LoraConfig`, `check_target_module_exists` and `get_pattern_key` of huggingface/peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from adapters.errors import AdapterError
from adapters.patterns import END_OF_NAME, LAYER, WHOLE_NAME, Patterns
from adapters.tensor_names import MODEL_MODULES, ROUTER_NAMES, WHOLE_DECODER

_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
    "init_lora_weights", "lora_dropout", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_type", "qalora_group_size", "revision", "runtime_config",
})  # fmt: skip
_UNDERSTOOD = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "lora_bias", "use_dora", "modules_to_save", "ensure_weight_tying",
    "target_parameters", "peft_version", "alora_invocation_tokens", "trainable_token_indices", "task_type",
})  # fmt: skip
# These initializations change the base model's own weights, and the saved matrices only fit the changed ones.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
STACKED_PARAMETERS = ("gate_up_proj", "down_proj")
"""Stacked parameters of all experts, in the order in which their module holds them."""
_ROUTER_PARAMETER = re.compile(rf"(?:.*\.)?(?:{ROUTER_NAMES})\.weight")
"""The only other parameter that takes an adapter."""
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.a-z+].*)?", re.DOTALL)

_Value = TypeVar("_Value", int, float)

MAX_PATTERNS = 4096
MAX_INVOCATION_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The fields of adapter_config.json that affect the computation.

    Attributes:
        rank: default for modules that `rank_pattern` does not match.
        alpha: default for modules that `alpha_pattern` does not match.
        use_rslora: scaling is alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, 2023).
        rank_pattern, alpha_pattern: regular expressions for the end of a module's name; the first match wins.
        target_modules: names or name suffixes, one regular expression for whole names, or None for all linear modules.
        exclude_modules: modules that are not targets, in the same forms; empty for none.
        target_parameters: names or suffixes of parameters: stacked expert matrices, and the router's weight.
        peft_version: (major, minor) of the PEFT that saved it; None if not given.
        layers_to_transform: layer indices that a list of `target_modules` is limited to; None for all.
        layers_pattern: names of the layer list that those indices refer to; empty for any.
        bias: "none"; "lora_only" and "all" allow biases that replace the base's, of targeted modules or of any.
        has_lora_bias: B has a bias.
        has_magnitudes: each targeted module's columns are scaled to learned norms (DoRA, arXiv 2402.09353).
        modules_to_save: name suffixes of modules whose weights the adapter replaces entirely.
        task_type: PEFT's name of what it was trained for; empty if not given.
        prefixes: prefix of the names that patterns and targets refer to, and the prefix of a whole decoder.
        ties_weights: a change of the embedding also applies to a tied output matrix, and the reverse.
        invocation_ids: the tokens of a prompt from which on the adapter applies (aLoRA, `adapters.activation`); empty
            if it always does.
        tokens: name suffixes of modules -> the tokens whose rows the adapter replaces there, in the order of the rows.
        patterns: all regular expressions among these, compiled.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str | None
    exclude_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    peft_version: tuple[int, int] | None
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    bias: str
    has_lora_bias: bool
    has_magnitudes: bool
    modules_to_save: tuple[str, ...]
    ties_weights: bool
    invocation_ids: tuple[int, ...]
    tokens: Mapping[str, tuple[int, ...]]
    task_type: str
    prefixes: tuple[str, str] = WHOLE_DECODER
    patterns: Patterns = field(compare=False, repr=False)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, given by its full name (`model.layers.0.self_attn.q_proj`)."""
        return self._first_match(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of B A for a module, given by its full name."""
        rank = self.rank_of(module)
        alpha = self._first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def is_saved(self, module: str, names: tuple[str, ...] | None = None) -> bool:
        """Tell whether the adapter is to replace the weight of a module, given by its full name; or these names do."""
        names = self.modules_to_save if names is None else names
        return module.endswith(names) or self._own_name(module).endswith(names)

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the tokens whose rows the adapter replaces in a module, given by its full name."""
        return next((tokens for name, tokens in self.tokens.items() if self.is_saved(module, (name,))), ())

    def has_target(self, module: str) -> bool:
        """Tell whether a linear module or the embedding, given by its full name, is targeted.

        A module in `modules_to_save` is not, whatever `target_modules` says.
        """
        is_saved, module = self.is_saved(module), self._own_name(module)
        if is_saved or self._names(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            # Some libraries leave routers out, as they are no linear modules everywhere.
            return not module.endswith((*MODEL_MODULES, "norm", ".gate", ".router", ".router.layer"))
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return self._names(self.target_modules, module)
        if not self._names(self.target_modules, module):
            return False
        return not self.layers_to_transform or self._layer_of(module) in self.layers_to_transform

    def has_target_parameter(self, parameter: str) -> bool:
        """Tell whether a parameter, given by its full name, is targeted."""
        return self._names(self.target_parameters, self._own_name(parameter))

    def _layer_of(self, module: str) -> int | None:
        if not self.layers_pattern:
            found = _ANY_LAYER.match(module)
        else:
            matches = (self.patterns.match(LAYER, pattern, module) for pattern in self.layers_pattern)
            found = next(filter(None, matches), None)
        return None if found is None or found["idx"] is None else int(found["idx"])

    def _names(self, modules: tuple[str, ...] | str, module: str) -> bool:
        """Tell whether a name matches the regular expression, or equals or ends with one of the listed names."""
        if isinstance(modules, str):
            return self.patterns.match(WHOLE_NAME, modules, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in modules)

    def _first_match(self, values: Mapping[str, _Value], module: str, default: _Value) -> _Value:
        module = self._own_name(module)
        for pattern, value in values.items():
            if self.patterns.match(END_OF_NAME, pattern, module):
                return value
        return default

    def _own_name(self, module: str) -> str:
        own, usual = self.prefixes
        return own + module.removeprefix(usual) if module.startswith(usual) else module


def parse_config(name: str, content: bytes) -> LoraConfig:
    """Parse the bytes of adapter_config.json.

    Raises:
        AdapterError: not JSON, or a field has a wrong type, is out of bounds, or requests something unsupported.
    """
    try:
        fields = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise AdapterError(name, "adapter_config.json is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterError(name, "adapter_config.json is not a JSON object")
    if fields.get("peft_type") != "LORA":
        raise AdapterError(name, f"peft_type is {_shown(fields.get('peft_type'))}, and only LORA is supported")
    bias = fields.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise AdapterError(name, f"bias is {_shown(bias)}, and only 'none', 'all' and 'lora_only' are supported")
    _refuse_base_changing_init(name, fields.get("init_lora_weights"))
    for key in sorted(set(fields) - _IGNORED - _UNDERSTOOD):
        # PEFT writes every option it knows, including those that are off.
        if fields[key] not in (None, False, [], {}, "", 0):
            raise AdapterError(name, f"{key[:100]} is not supported")
    has_magnitudes, has_lora_bias = _switch(name, fields, "use_dora"), _switch(name, fields, "lora_bias")
    if has_magnitudes and has_lora_bias:
        raise AdapterError(name, "use_dora and lora_bias exclude each other")
    config = LoraConfig(
        rank=_rank(name, "r", fields.get("r", 8)),
        alpha=_alpha(name, "lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=_switch(name, fields, "use_rslora"),
        rank_pattern={k: _rank(name, f"rank_pattern.{k}", v) for k, v in _patterns(name, fields, "rank_pattern")},
        alpha_pattern={k: _alpha(name, f"alpha_pattern.{k}", v) for k, v in _patterns(name, fields, "alpha_pattern")},
        target_modules=_target_modules(name, fields),
        exclude_modules=_exclude_modules(name, fields.get("exclude_modules")),
        target_parameters=_target_parameters(name, fields.get("target_parameters")),
        peft_version=_peft_version(fields.get("peft_version")),
        layers_to_transform=_layers(name, fields.get("layers_to_transform")),
        layers_pattern=_layers_pattern(name, fields.get("layers_pattern")),
        bias=str(bias),
        has_lora_bias=has_lora_bias,
        has_magnitudes=has_magnitudes,
        modules_to_save=_modules_to_save(name, fields.get("modules_to_save")),
        ties_weights=_switch(name, fields, "ensure_weight_tying"),
        invocation_ids=_invocation(name, fields),
        tokens=_tokens(name, fields.get("trainable_token_indices")),
        task_type=str(fields.get("task_type") or "")[:50],
        patterns=Patterns(name),
    )
    for key, form, patterns in (
        ("rank_pattern", END_OF_NAME, config.rank_pattern),
        ("alpha_pattern", END_OF_NAME, config.alpha_pattern),
        ("target_modules", WHOLE_NAME, _regex(config.target_modules)),
        ("exclude_modules", WHOLE_NAME, _regex(config.exclude_modules)),
        ("layers_pattern", LAYER, config.layers_pattern),
    ):
        for pattern in patterns:
            config.patterns.add(key, form, pattern)
    return config


def _refuse_base_changing_init(name: str, init: object) -> None:
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterError(
            name,
            f"init_lora_weights {init[:50]!r} changes the base model; convert the adapter to plain LoRA when saving",
        )


def _switch(name: str, fields: dict[str, object], field: str) -> bool:
    value = fields.get(field) or False
    if type(value) is not bool:
        raise AdapterError(name, f"{field} is not true or false")
    return value


def _modules_to_save(name: str, value: object) -> tuple[str, ...]:
    names = _strings(value)
    if value and (not names or not all(names) or len(names) > MAX_PATTERNS):
        raise AdapterError(name, f"modules_to_save is not a list of at most {MAX_PATTERNS} names")
    return tuple(sorted(names))


def _tokens(name: str, value: object) -> dict[str, tuple[int, ...]]:
    by_module = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    found: dict[str, tuple[int, ...]] = {}
    for module, tokens in by_module.items():
        if (
            not module
            or not isinstance(tokens, list)
            or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens)
            or not 1 <= len(set(tokens)) == len(tokens) <= MAX_PATTERNS
        ):
            raise AdapterError(
                name,
                f"trainable_token_indices is neither a list of 1 to {MAX_PATTERNS} different token ids, nor such lists "
                "by module name",
            )
        found[module] = tuple(tokens)
    return found


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
    return list(value.items())


def _target_modules(name: str, fields: dict[str, object]) -> tuple[str, ...] | str | None:
    value = fields.get("target_modules")
    if not value and fields.get("target_parameters"):
        return ()
    if isinstance(value, str) and value.lower() == "all-linear":
        return None
    return _modules(name, "target_modules", value)


def _target_parameters(name: str, value: object) -> tuple[str, ...]:
    if not value:
        return ()
    names = _modules(name, "target_parameters", value)
    if isinstance(names, str):
        raise AdapterError(name, "target_parameters is not a list")
    for named in names:
        if named.rpartition(".")[2] not in STACKED_PARAMETERS and not _ROUTER_PARAMETER.fullmatch(named):
            raise AdapterError(
                name,
                f"target_parameters names {_shown(named)}, but of parameters only {' and '.join(STACKED_PARAMETERS)} "
                "of experts and the router's weight take an adapter",
            )
    return names


def _peft_version(value: object) -> tuple[int, int] | None:
    found = _VERSION.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _exclude_modules(name: str, value: object) -> tuple[str, ...] | str:
    return _modules(name, "exclude_modules", value) if value else ()


def _modules(name: str, field: str, value: object) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return value
    names = _strings(value)
    if not names or len(names) > MAX_PATTERNS:
        raise AdapterError(name, f"{field} is neither a string nor a list of 1 to {MAX_PATTERNS} strings")
    # PEFT keeps a set and writes it in arbitrary order.
    return tuple(sorted(names))


def _regex(modules: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Return the regular expression for modules, or nothing if they are listed by name."""
    return (modules,) if isinstance(modules, str) else ()


def _invocation(name: str, fields: dict[str, object]) -> tuple[int, ...]:
    """Return the tokens that activate the adapter; it may change only what each token is computed with by itself."""
    value = fields.get("alora_invocation_tokens")
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INVOCATION_TOKENS:
        raise AdapterError(name, f"alora_invocation_tokens is not a list of 1 to {MAX_INVOCATION_TOKENS} token ids")
    if not all(type(item) is int and 0 <= item < 1 << 31 for item in value):
        raise AdapterError(name, "alora_invocation_tokens holds what is no token id")
    for key in ("use_dora", "modules_to_save", "target_parameters", "bias"):
        if fields.get(key) not in (None, False, [], "none"):
            raise AdapterError(name, f"{key} is not supported with alora_invocation_tokens")
    return tuple(value)


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
    return patterns


def _strings(value: object) -> tuple[str, ...]:
    """Return a list's strings, or an empty tuple if it is not a list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ()
    return tuple(value)


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _shown(value: object) -> str:
    return repr(value)[:50]
