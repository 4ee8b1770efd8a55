"""Fields of a `quantization_config` that may have few values only, and the groups of one of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from engine.decoder.tensor_kinds import Shape
from engine.errors import CheckpointError

COMPRESSED = "compressed-tensors"
FLOATS, PACKED, INTEGERS, NVFP4 = "float-quantized", "pack-quantized", "int-quantized", "nvfp4-pack-quantized"
"""Formats of compressed-tensors."""

Kind = TypeVar("Kind", bound=Hashable)


def check_fields(fields: Mapping[str, object], wanted: Mapping[str, tuple[object, ...]], within: str) -> None:
    """Refuse a field that has none of the values that are known for it; None among those is a field left out.

    Raises:
        CheckpointError: naming the field, what it is and what is read; `within` is where the fields are.
    """
    for name, known in wanted.items():
        if fields.get(name) not in known:
            values = " or ".join(repr(value) for value in known if value is not None) or "nothing"
            raise CheckpointError(f"{within}.{name} is {fields.get(name)!r}; only {values} is supported.")


def parse_groups(
    fields: Mapping[str, object], within: str, parse: Callable[[Mapping[str, object], Mapping[str, object], str], Kind]
) -> Kind:
    """Return what compressed-tensors' groups are, which must be one thing.

    Args:
        parse: makes it of a group, its `weights`, and where it is.

    Raises:
        CheckpointError: naming the field that asks for what is not supported.
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
    """Return which shapes the scales of `out` outputs may have, or the one of a tensor."""
    return ((out, 1), (out,)) if has_each else ((), (1,))
