"""Does an adapter fit a base model? Decided from the header alone, before a tensor is made. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.errors import AdapterError
from adapters.peft_format import LoraConfig, parse_module_name, parse_tensor_name
from adapters.tensor_file import TensorEntry

LinearShapes = Mapping[str, tuple[int, int]]
"""(in, out) features of the base's linear modules by full name, `model.layers.0.self_attn.q_proj`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """One adapted module: where its halves lie, and the factor of their product."""

    a: TensorEntry
    b: TensorEntry
    scaling: float


def validate(
    name: str, config: LoraConfig, entries: Mapping[str, TensorEntry], linear_shapes: LinearShapes, max_rank: int
) -> dict[tuple[int, str], ModuleLayout]:
    """Return the layout of every adapted module by (layer, module), in which each tensor of the file has its place.

    Raises:
        AdapterError: a module the base lacks or that is not targeted, a missing half, a targeted module without
            tensors, a wrong shape, or a rank over `max_rank`.
    """
    halves_by_module: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries.values():
        module, half = parse_tensor_name(name, entry.name)
        halves_by_module.setdefault(module, {})[half] = entry
    if not halves_by_module:
        raise AdapterError(name, "it holds no tensors")
    module_by_key: dict[tuple[int, str], str] = {}
    for module in halves_by_module:
        key = parse_module_name(module)
        if key is None or module not in linear_shapes:
            raise AdapterError(name, f"the base model has no module {module!r} that takes an adapter")
        if not config.has_target(module):
            raise AdapterError(name, f"it has tensors for {module}, which its target_modules do not name")
        module_by_key[key] = module
    layouts = {
        key: _layout(name, module, halves_by_module[module], config, linear_shapes[module], max_rank)
        for key, module in module_by_key.items()
    }
    for module in linear_shapes:
        key = parse_module_name(module)
        if key is not None and key not in layouts and config.has_target(module):
            raise AdapterError(name, f"its target_modules name {module}, for which it has no tensors")
    return layouts


def _layout(
    name: str,
    module: str,
    halves: Mapping[str, TensorEntry],
    config: LoraConfig,
    features: tuple[int, int],
    max_rank: int,
) -> ModuleLayout:
    """Check one module's halves against the configuration and the base."""
    for half in "AB":
        if half not in halves:
            raise AdapterError(name, f"{module} lacks its lora_{half} matrix")
    rank = config.rank_of(module)
    if rank > max_rank:
        raise AdapterError(name, f"{module} has rank {rank}, more than the {max_rank} that this server takes")
    in_features, out_features = features
    for half, expected in (("A", (rank, in_features)), ("B", (out_features, rank))):
        found = halves[half].shape
        if found != expected:
            raise AdapterError(
                name, f"lora_{half} of {module} has shape {list(found)}, and the base model needs {list(expected)}"
            )
    return ModuleLayout(a=halves["A"], b=halves["B"], scaling=config.scaling_of(module))
