"""Per-layer differences within one decoder: attention window, rotary embedding, and dense MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.decoder.experts import sparse_layers
from engine.decoder.families import Family
from engine.decoder.fields import Fields
from engine.decoder.rope import NO_ROPE, ORIGINAL, RopeSpec, parse_rope
from engine.decoder.scales import Scales
from engine.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """How one layer attends, and whether it has an MLP or experts.

    Attributes:
        rope: its rotary embedding.
        scale: factor of attention scores.
        window: how many of the last positions a token attends to, its own included; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
        is_sparse: the layer has a mixture of experts instead of an MLP.
    """

    rope: RopeSpec
    scale: float
    window: int = 0
    softcap: float = 0.0
    is_sparse: bool = False

    def within(self, max_len: int) -> LayerForm:
        """Return the form for sequences of up to `max_len` tokens, without a window if they all fit into it."""
        return replace(self, window=0) if self.window >= max_len else self


def layer_forms(
    fields: Fields, family: Family, scales: Scales, *, num_layers: int, head_dim: int
) -> tuple[LayerForm, ...]:
    """Return the form of each layer.

    Raises:
        CheckpointError: a field is wrong, missing or not supported.
    """
    rotates = _rotates(fields, family, num_layers)
    has_window = fields.switch(family.uses_window)
    kinds = _kinds(fields, family, rotates) if has_window else _without_window(fields, family, num_layers)
    window = 0
    if SLIDING in kinds and fields.config.get("sliding_window", family.window) is not None:
        window = fields.count("sliding_window", family.window)
    rope_by_kind = {kind: _rope(fields, family, kind) for kind in set(kinds)}
    for rope in rope_by_kind.values():
        _check_rope(fields, family, rope, head_dim)
    return tuple(
        LayerForm(
            rope=rope_by_kind[kind] if is_rotated else NO_ROPE,
            scale=head_dim**-0.5 if scales.scores is None else scales.scores,
            window=window if kind == SLIDING else 0,
            softcap=scales.score_softcap,
            is_sparse=is_sparse,
        )
        for kind, is_rotated, is_sparse in zip(
            kinds, rotates, sparse_layers(fields, family.mixture, num_layers), strict=True
        )
    )


def _rotates(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    """Return which layers have a rotary embedding; `no_rope_layers` has a 0 for those that do not."""
    if not family.unrotated_every:
        return [True] * num_layers
    told = fields.config.get("no_rope_layers")
    if told is None:
        every = fields.count("no_rope_layer_interval", family.unrotated_every)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(told, list) or len(told) != num_layers or any(number not in (0, 1) for number in told):
        raise CheckpointError(f"{fields.where}: no_rope_layers must say 0 or 1 of each of {num_layers} layers.")
    return [number == 1 for number in told]


def _kinds(fields: Fields, family: Family, rotates: Sequence[bool]) -> list[str]:
    """Return the attention type of each layer, from `layer_types` or else by the family's pattern."""
    kinds, num_layers = fields.config.get("layer_types"), len(rotates)
    if kinds is None and family.unrotated_every:
        return [FULL if is_rotated else SLIDING for is_rotated in rotates]
    if kinds is None:
        first = fields.count("max_window_layers", family.num_full_layers, least=0) if family.num_full_layers else 0
        every = fields.count("sliding_window_pattern", family.full_every) if family.full_every else num_layers + 1
        return [FULL if layer < first or (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(
            f"{fields.where}: layer_types must say {FULL!r} or {SLIDING!r} of each of {num_layers} layers."
        )
    return kinds


def _without_window(fields: Fields, family: Family, num_layers: int) -> list[str]:
    """Return the attention types of layers that have no window.

    Raises:
        CheckpointError: the field that says so contradicts `layer_types`.
    """
    kinds = fields.config.get("layer_types")
    if isinstance(family.uses_window, str) and isinstance(kinds, list) and SLIDING in kinds:
        raise CheckpointError(f"{fields.where}: layer_types names {SLIDING!r}, but {family.uses_window} is false.")
    return [FULL] * num_layers


def _check_rope(fields: Fields, family: Family, rope: RopeSpec, head_dim: int) -> None:
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim < 2 or rotary_dim % 2 or (rope.fraction != 1.0 and not family.rotates_partly):
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor {rope.fraction:g} of heads of {head_dim} is not supported."
        )
    if rope.kind == "longrope" and len(rope.factors) != rotary_dim // 2:
        raise CheckpointError(
            f"{fields.where}: short_factor has {len(rope.factors)} numbers; {rotary_dim // 2} are needed."
        )


def _rope(fields: Fields, family: Family, kind: str) -> RopeSpec:
    """Return the rotary embedding of one attention type, which may have its own field or block in config.json."""
    config = dict(fields.config)
    blocks = config.get("rope_parameters")
    if isinstance(blocks, Mapping) and isinstance(blocks.get(kind), Mapping):
        config["rope_parameters"] = blocks[kind]
    elif kind == SLIDING and family.local_theta is not None:
        config |= {"rope_parameters": None, "rope_scaling": None, "rope_theta": config.get("rope_local_base_freq")}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = family.rope
    if config.get("rope_theta") is None:
        is_local = kind == SLIDING and family.local_theta is not None
        config["rope_theta"] = family.local_theta if is_local else family.theta
    if config.get(ORIGINAL) is None and family.original_max_len:
        config[ORIGINAL] = family.original_max_len
    return parse_rope(config, fields.where)
