"""Check that an adapter fits a base model, from config and header alone, before any tensor. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from adapters.errors import AdapterError
from adapters.experts import ExpertPlace, Stack, are_swapped, halves_of, is_paired, place_of, refuse_twofold
from adapters.module_forms import fitted
from adapters.peft_format import LoraConfig
from adapters.tensor_file import TensorEntry
from adapters.tensor_names import (
    EMBEDDING,
    HEAD,
    ROUTER,
    WHOLE_MODEL,
    parse_module_name,
    parse_tensor_name,
    prefixes_of,
)

ModuleShapes = Mapping[str, tuple[int, ...]]
"""Shapes of everything in the base that takes an adapter, by full name: (in, out) of linear modules
(`model.layers.0.self_attn.q_proj`), of the output matrix and of the embedding (in is the vocabulary); (width,) of norms
and, under `NAME.bias`, of biases that exist.

MoE experts have (experts, in, out) under the name without an expert index (`model.layers.0.mlp.experts.up_proj`) and
under the stacked parameter's name (`model.layers.0.mlp.experts.gate_up_proj`). There out is two dimensions for gate and
up: (2, inner) if the gate's rows come before those of up, (inner, 2) if they are interleaved."""

_LINEAR_PARTS = frozenset({"lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "bias"})
_ROWS = "trainable_tokens_delta"
"""Whole rows, in spite of their name: PEFT saves no differences."""
_END_PARTS = frozenset({"lora_magnitude_vector", "weight", "base_layer.weight", _ROWS})
_EMBEDDING_PARTS = _END_PARTS | {"lora_embedding_A", "lora_embedding_B"}
_HEAD_PARTS = _END_PARTS | {"lora_A.weight", "lora_B.weight", "lora_B.bias"}
_ENDS = (EMBEDDING, "lm_head")
_EXPERT_PARTS = frozenset({"lora_A.weight", "lora_B.weight"})
_HEAD_NAMES = frozenset({HEAD, "classifier"})
"""What PEFT adds to `modules_to_save` of a classifier, whichever of them the base has."""
MAX_LABELS = 1024
_HALVES = {"A": ("lora_A.weight", "lora_embedding_A"), "B": ("lora_B.weight", "lora_embedding_B")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """The file's tensors for one module of the base that the adapter changes.

    Attributes:
        module: its full name.
        a, b: factors of the low-rank product, both or none; `scaling` multiplies the product.
        lora_bias: bias of B; scaled like the product.
        magnitude: the learned norm of each column of weight plus product (DoRA).
        bias: replaces the base's.
        weight: replaces the base's.
        rows: replace the base's rows of `tokens`, in their order.
        base_weight: copy of the base's own weight, which PEFT saves with an adapted embedding.
        stack: how `a` and `b` are stacked over all experts; None for a single module.
    """

    module: str
    scaling: float
    a: TensorEntry | None = None
    b: TensorEntry | None = None
    lora_bias: TensorEntry | None = None
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None
    weight: TensorEntry | None = None
    rows: TensorEntry | None = None
    tokens: tuple[int, ...] = ()
    base_weight: TensorEntry | None = None
    stack: Stack | None = None


def validate(
    name: str, config: LoraConfig, entries: Mapping[str, TensorEntry], shapes: ModuleShapes, max_rank: int
) -> dict[tuple[int, str], AdaptedModule]:
    """Return the layout of every changed module by (layer, module); each tensor of the file is in exactly one.

    Raises:
        AdapterError: a module the base lacks or that is not targeted, a missing half, a targeted module without
            tensors, a wrong shape, or a rank over `max_rank`.
    """
    # The output matrix may have the same name under every prefix; take the prefix from the tensors that show it.
    config = replace(config, prefixes=max(map(prefixes_of, entries), default=config.prefixes))
    parts_by_module: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries.values():
        module, part = parse_tensor_name(name, entry.name)
        if part in parts_by_module.setdefault(module, {}):
            raise AdapterError(name, f"it has two tensors for the {part} of {module}")
        parts_by_module[module][part] = entry
    if not parts_by_module:
        raise AdapterError(name, "it holds no tensors")
    layouts = _head_layout(name, config, parts_by_module.pop(HEAD, {}), shapes)
    shapes = fitted(shapes, parts_by_module)
    _check_ends(name, parts_by_module, shapes)
    module_by_key: dict[tuple[int, str], str] = {}
    place_by_module: dict[str, ExpertPlace] = {}
    for module in tuple(parts_by_module):
        key = parse_module_name(module)
        # What has three dimensions is all experts of a layer, under names of the base's own.
        if key is not None and len(shapes.get(module, (0, 0, 0))) < 3:
            if key in module_by_key:
                raise AdapterError(name, f"{module} and {module_by_key[key]} are one module of the base")
            module_by_key[key] = module
            continue
        place = place_of(name, module, config, shapes)
        if place is None or place.key in module_by_key:
            raise AdapterError(name, f"the base model has no module {module!r} that takes an adapter")
        parts_by_module[place.name] = parts_by_module.pop(module)
        module_by_key[place.key] = place.name
        place_by_module[place.name] = place
    refuse_twofold(name, module_by_key)
    # PEFT ties rows of tokens in any case.
    if config.ties_weights and any(parts_by_module.get(module, {}).keys() - {_ROWS} for module in _ENDS):
        raise AdapterError(name, "ensure_weight_tying is not supported for an adapter of embed_tokens or lm_head")
    _check_invocation(name, config, module_by_key.keys(), shapes)
    _check_tokens(name, config, parts_by_module, shapes, max_rank)
    stacks = [
        (a.shape, place)
        for module, place in place_by_module.items()
        if len(place.shape) > 2 and (a := parts_by_module[module].get("lora_A.weight")) is not None and a.shape
    ]
    swapped = are_swapped(name, config, stacks)
    for key, module in module_by_key.items():
        parts, at = parts_by_module[module], place_by_module.get(module)
        is_router = key[1] == ROUTER
        _check_parts(name, config, module, parts, has_bias=f"{module}.bias" in shapes, is_router=is_router)
        shape = shapes[module] if at is None else at.shape
        stack = Stack(shape[0], is_paired(shape), swapped) if len(shape) > 2 else None
        layouts[key] = _layout(name, module, parts, config, shape, max_rank, stack)
    _check_complete(name, config, parts_by_module, shapes, has_head=(WHOLE_MODEL, HEAD) in layouts)
    return layouts


def _check_ends(name: str, parts_by_module: Mapping[str, Mapping[str, TensorEntry]], shapes: ModuleShapes) -> None:
    """Refuse ends of another vocabulary before all else: PEFT saves them though no setting says so, even twice."""
    for module in _ENDS:
        if module in shapes:
            _check_whole(name, module, parts_by_module.get(module, {}), shapes[module])


def _head_layout(
    name: str, config: LoraConfig, parts: Mapping[str, TensorEntry], shapes: ModuleShapes
) -> dict[tuple[int, str], AdaptedModule]:
    """Return the layout of a classifier, if there is one.

    It is refused if it is of another task than a text's, or does not fit the base's final hidden states.
    """
    weight = parts.get("weight")
    if weight is None:
        return {}
    if config.task_type != "SEQ_CLS":
        raise AdapterError(
            name, f"it brings a classifier, and its task_type is {config.task_type!r}; only 'SEQ_CLS' is supported"
        )
    if _HEAD_NAMES.isdisjoint(config.modules_to_save):
        raise AdapterError(name, f"it has a weight for {HEAD}, which its modules_to_save do not name")
    if EMBEDDING not in shapes:
        raise AdapterError(name, "classifiers are not supported for a base that transformers computes")
    hidden = shapes[EMBEDDING][1]
    if len(weight.shape) != 2 or weight.shape[1] != hidden or not 1 <= weight.shape[0] <= MAX_LABELS:
        raise AdapterError(
            name,
            f"weight of {HEAD} has shape {list(weight.shape)}, and the base model needs {hidden} columns, and 1 to "
            f"{MAX_LABELS} labels",
        )
    return {(WHOLE_MODEL, HEAD): AdaptedModule(module=HEAD, scaling=1.0, weight=weight)}


def _check_invocation(
    name: str, config: LoraConfig, modules: Collection[tuple[int, str]], shapes: ModuleShapes
) -> None:
    """Refuse an activated adapter that the base has no tokens for, or whose embedding PEFT would change everywhere."""
    num_tokens = shapes.get(EMBEDDING, (1 << 31,))[0]
    if config.invocation_ids and max(config.invocation_ids) >= num_tokens:
        raise AdapterError(
            name,
            f"alora_invocation_tokens has the token {max(config.invocation_ids)}, and the base model has {num_tokens}",
        )
    if config.invocation_ids and (config.tokens or (WHOLE_MODEL, "embed_tokens") in modules):
        raise AdapterError(name, "an adapter of embed_tokens or tokens is not supported with alora_invocation_tokens")


def _check_tokens(
    name: str,
    config: LoraConfig,
    parts_by_module: Mapping[str, Mapping[str, TensorEntry]],
    shapes: ModuleShapes,
    max_rank: int,
) -> None:
    """Refuse single tokens that the base lacks, without rows, or in too great a number; and rows without tokens."""
    for named, tokens in config.tokens.items():
        module = next((end for end in _ENDS if end in shapes and config.is_saved(end, (named,))), None)
        if module is None:
            raise AdapterError(
                name, f"trainable_token_indices name {named[:100]!r}, which is neither embed_tokens nor lm_head"
            )
        if max(tokens) >= shapes[EMBEDDING][0]:
            raise AdapterError(
                name,
                f"trainable_token_indices name {max(tokens)}, and the base model's vocabulary ends before "
                f"{shapes[EMBEDDING][0]}; tokens that were added for the adapter are not supported",
            )
        if len(tokens) > max_rank // 2:
            raise AdapterError(
                name,
                f"trainable_token_indices name {len(tokens)} tokens, more than the {max_rank // 2} that this server "
                "takes, half of the highest rank",
            )
    for module in _ENDS:
        tokens, parts = config.tokens_of(module), parts_by_module.get(module, {})
        if _ROWS in parts and not tokens:
            raise AdapterError(name, f"it has rows of tokens for {module}, which trainable_token_indices do not name")
        if _ROWS in parts and not parts.keys() <= {_ROWS, "base_layer.weight"}:
            raise AdapterError(name, f"it has rows of tokens for {module}, and changes all of it besides")
        # Saved once if the two are tied.
        is_shared = module == "lm_head" and tokens == config.tokens_of(EMBEDDING)
        if tokens and _ROWS not in parts and not is_shared:
            raise AdapterError(name, f"trainable_token_indices name tokens of {module}, for which it has no rows")


def _check_parts(
    name: str,
    config: LoraConfig,
    module: str,
    parts: Mapping[str, TensorEntry],
    *,
    has_bias: bool,
    is_router: bool,
) -> None:
    """Refuse tensors that this kind of module cannot have, or that the configuration does not announce."""
    usual = _EXPERT_PARTS if is_router or ".experts." in module else _LINEAR_PARTS
    known = {EMBEDDING: _EMBEDDING_PARTS, "lm_head": _HEAD_PARTS}.get(module, usual)
    for part in parts.keys() - (frozenset({"weight"}) if module.endswith("norm") else known):
        raise AdapterError(name, f"a {part} of {module} is not supported")
    if "bias" in parts and (not has_bias or config.bias == "none"):
        reason = "its bias setting is 'none'" if has_bias else "in the base model it has none"
        raise AdapterError(name, f"it has a bias for {module}, but {reason}")
    if "weight" in parts and not config.is_saved(module):
        raise AdapterError(name, f"it has a weight for {module}, which its modules_to_save do not name")
    has_product = not parts.keys().isdisjoint({*_HALVES["A"], *_HALVES["B"]})
    if has_product and "weight" in parts:
        raise AdapterError(name, f"it has both a product and a weight for {module}")
    parameter = module if ".experts." in module else f"{module}.weight"
    if has_product and not (config.has_target(module) or config.has_target_parameter(parameter)):
        raise AdapterError(name, f"it has tensors for {module}, which its target_modules do not name")
    for part, is_wanted, field in (
        ("lora_magnitude_vector", config.has_magnitudes, "use_dora"),
        ("lora_B.bias", config.has_lora_bias, "lora_bias"),
    ):
        if has_product and is_wanted and part not in known:
            raise AdapterError(name, f"{field} of {module} is not supported")
        if (has_product and is_wanted) != (part in parts):
            raise AdapterError(name, f"{module} {'lacks its' if is_wanted else 'has a'} {part}, against its {field}")


def _check_complete(
    name: str,
    config: LoraConfig,
    parts_by_module: Mapping[str, Mapping[str, TensorEntry]],
    shapes: ModuleShapes,
    *,
    has_head: bool,
) -> None:
    """Refuse an adapter whose configuration names modules without tensors, or modules that the base lacks."""
    name_by_key = {parse_module_name(module): module for module in parts_by_module}
    for module, shape in shapes.items():
        if name_by_key.get(parse_module_name(module), module) != module:
            # The base knows the adapter's module by two names.
            continue
        parts = parts_by_module.get(module, {})
        if len(shape) == 2 and config.has_target(module) and parts.keys().isdisjoint(_HALVES["A"] + _HALVES["B"]):
            raise AdapterError(name, f"its target_modules name {module}, for which it has no tensors")
        # Single experts may be missing, but not a targeted stacked parameter.
        if len(shape) > 2 and config.has_target_parameter(module) and not parts:
            raise AdapterError(name, f"its target_parameters name {module}, for which it has no tensors")
        if config.is_saved(module) and not module.endswith(".bias") and "weight" not in parts:
            raise AdapterError(name, f"its modules_to_save name {module}, for which it has no weight")
    for saved in config.modules_to_save:
        is_head = has_head and saved in _HEAD_NAMES
        if not is_head and not any(config.is_saved(module, (saved,)) for module in shapes):
            raise AdapterError(
                name, f"modules_to_save names {saved[:100]!r}, which is neither a norm, embed_tokens nor lm_head"
            )


def _layout(
    name: str,
    module: str,
    parts: Mapping[str, TensorEntry],
    config: LoraConfig,
    shape: tuple[int, ...],
    max_rank: int,
    stack: Stack | None = None,
) -> AdaptedModule:
    """Check the shapes of one module's tensors against the configuration and the base."""
    halves = {half: next((parts[part] for part in names if part in parts), None) for half, names in _HALVES.items()}
    rank = config.rank_of(module)
    if len(shape) >= 2 and any(halves.values()):
        for half, entry in halves.items():
            if entry is None:
                raise AdapterError(name, f"{module} lacks its lora_{half} matrix")
        if rank > max_rank:
            raise AdapterError(name, f"{module} has rank {rank}, more than the {max_rank} that this server takes")
        a, b = (rank, shape[0]), (shape[1], rank)
        if stack is not None:
            a, b = halves_of(shape, rank, swapped=stack.is_swapped)
        for half, expected in (("A", a), ("B", b)):
            _check_shape(name, f"lora_{half} of {module}", halves[half], expected)
    for part in ("lora_B.bias", "lora_magnitude_vector", "bias"):
        _check_shape(name, f"{part} of {module}", parts.get(part), shape[-1:])
    tokens, hidden = config.tokens_of(module), shape[-1 if module == EMBEDDING else 0]
    _check_shape(name, f"{_ROWS} of {module}", parts.get(_ROWS), (len(tokens), hidden))
    _check_whole(name, module, parts, shape)
    return AdaptedModule(
        module=module,
        scaling=config.scaling_of(module),
        a=halves["A"],
        b=halves["B"],
        lora_bias=parts.get("lora_B.bias"),
        magnitude=parts.get("lora_magnitude_vector"),
        bias=parts.get("bias"),
        weight=parts.get("weight"),
        rows=parts.get(_ROWS),
        tokens=tokens,
        base_weight=parts.get("base_layer.weight"),
        stack=stack,
    )


def _check_whole(name: str, module: str, parts: Mapping[str, TensorEntry], shape: tuple[int, ...]) -> None:
    """Check the shapes of what replaces, or copies, the base's weight of a module."""
    # Weights are stored [out, in], the embedding's [vocabulary, hidden].
    whole = shape if module == EMBEDDING else shape[::-1]
    for part in ("weight", "base_layer.weight"):
        _check_shape(name, f"{part} of {module}", parts.get(part), whole)


def _check_shape(name: str, what: str, entry: TensorEntry | None, expected: tuple[int, ...]) -> None:
    if entry is not None and entry.shape != expected:
        why = " at the rank in its configuration" if what.startswith(("lora_A", "lora_B")) else ""
        if what.startswith(("weight", "base_layer.weight")) and len(entry.shape) == 2:
            why = "; tokens that were added for the adapter are not supported"
        raise AdapterError(
            name, f"{what} has shape {list(entry.shape)}, and the base model needs {list(expected)}{why}"
        )
