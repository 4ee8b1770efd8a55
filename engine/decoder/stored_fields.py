"""Checks fields of a `quantization_config` against supported values, and parses compressed-tensors' groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from engine.decoder.tensor_kinds import Shape
from engine.errors import CheckpointError

COMPRESSED = "compressed-tensors"
FLOATS, PACKED, INTEGERS, NVFP4 = "float-quantized", "pack-quantized", "int-quantized", "nvfp4-pack-quantized"
"""Values of `format` in compressed-tensors."""

Kind = TypeVar("Kind", bound=Hashable)


def check_fields(fields: Mapping[str, object], wanted: Mapping[str, tuple[object, ...]], within: str) -> None:
    """Refuse a field whose value is not among those in `wanted`; None there allows a missing field.

    Raises:
        CheckpointError: names the field (below `within`), its value and the supported ones.
    """
    for name, known in wanted.items():
        if fields.get(name) not in known:
            values = " or ".join(repr(value) for value in known if value is not None) or "nothing"
            raise CheckpointError(f"{within}.{name} is {fields.get(name)!r}; only {values} is supported.")


def parse_groups(
    fields: Mapping[str, object], within: str, parse: Callable[[Mapping[str, object], Mapping[str, object], str], Kind]
) -> Kind:
    """Parse compressed-tensors' `config_groups`, which must all have the same layout, and return it.

    Args:
        parse: returns the layout from a group, its `weights` and its location for messages.

    Raises:
        CheckpointError: a value is not supported; the message names the field.
    """
    check_fields(fields, {"transform_config": (None, {})}, within)
    sparsity = fields.get("sparsity_config")
    check_fields(
        sparsity if isinstance(sparsity, Mapping) else {}, {"format": ("dense", None)}, f"{within}.sparsity_config"
    )
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{within}.config_groups is not a JSON object with members.")
    found = set()
    for name, group in groups.items():
        place = f"{within}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
            raise CheckpointError(f"{place} has no weights.")
        check_fields(group, {"output_activations": (None,), "format": (fields.get("format"), None)}, place)
        found.add(parse(group, weights, place))
    if len(found) > 1:
        raise CheckpointError(f"{within}.config_groups has {len(found)} groups of weights; only one is supported.")
    return found.pop()


def scale_shapes(out: int, has_each: bool) -> tuple[Shape, ...]:
    """Return the allowed shapes of scales: per output if `has_each`, otherwise per tensor."""
    return ((out, 1), (out,)) if has_each else ((), (1,))
