"""Projections that are separate in the base and fused in an adapter, or the reverse; only the names differ.

    self_attn.qkv_proj  [ q | k | v ]     mlp.gate_up_proj  [ gate | up ]     output rows, concatenated

A Phi-3 adapter may have been trained on, or be served by, a checkpoint whose projections were split. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Shapes = Mapping[str, tuple[int, ...]]
"""As `adapters.validate.ModuleShapes`."""

PARTS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


def part_widths(shapes: Shapes) -> dict[str, dict[str, int]]:
    """Return the output width of each part of a fusible module, by the fused name; only if equal in all layers."""
    found: dict[str, dict[str, int]] = {}
    for joined, parts in PARTS.items():
        block, _, name = joined.partition(".")
        widths = [_widths_at(shapes, at, name, parts) for at in _blocks(shapes, block, (name, *parts))]
        if widths and widths[0] is not None and all(each == widths[0] for each in widths):
            found[name] = widths[0]
    return found


def fitted(shapes: Shapes, modules: Iterable[str]) -> Shapes:
    """Return the base's shapes under the adapter's module names, where it fuses or splits projections differently."""
    unknown = [module for module in modules if module not in shapes]
    if not unknown:
        return shapes
    made, widths_by_name = dict(shapes), part_widths(shapes)
    for joined, parts in PARTS.items():
        block, _, name = joined.partition(".")
        widths = widths_by_name.get(name)
        if widths is None:
            continue
        if any(module.endswith(tuple(f".{block}.{part}" for part in parts)) for module in unknown):
            for at in _blocks(shapes, block, (name,)):
                _take_apart(made, at, name, widths)
        if any(module.endswith(f".{joined}") for module in unknown):
            for at in _blocks(shapes, block, parts):
                _join(made, at, name, widths)
    return made


def stored_parts(shapes: Shapes, module: str) -> list[tuple[str, slice]]:
    """Return the base modules, and the slice of their output rows, that make up a module of `fitted`.

    Raises:
        KeyError: the module is neither the base's nor a fused module or part of one.
    """
    if module in shapes:
        return [(module, slice(None))]
    at, _, name = module.rpartition(".")
    for joined, parts in PARTS.items():
        whole = joined.partition(".")[2]
        if name == whole:
            return [(f"{at}.{part}", slice(None)) for part in parts]
        if name in parts:
            widths = part_widths(shapes)[whole]
            start = sum(widths[part] for part in parts[: parts.index(name)])
            return [(f"{at}.{whole}", slice(start, start + widths[name]))]
    raise KeyError(module)


def _blocks(shapes: Shapes, block: str, names: tuple[str, ...]) -> list[str]:
    """Return the blocks `model.layers.N.BLOCK` that contain a module of one of these names."""
    ends = tuple(f".{block}.{name}" for name in names)
    return list(dict.fromkeys(module.rpartition(".")[0] for module in shapes if module.endswith(ends)))


def _widths_at(shapes: Shapes, at: str, name: str, parts: tuple[str, ...]) -> dict[str, int] | None:
    own = [shapes.get(f"{at}.{part}") for part in parts]
    if all(own):
        return {part: shape[1] for part, shape in zip(parts, own, strict=True) if shape is not None}
    whole, output = shapes.get(f"{at}.{name}"), shapes.get(f"{at}.o_proj")
    if whole is None:
        return None
    if len(parts) == 2:
        return dict.fromkeys(parts, whole[1] // 2)
    if output is None:
        return None
    # The input of o_proj is as wide as the queries.
    rest = whole[1] - output[0]
    return {parts[0]: output[0], parts[1]: rest // 2, parts[2]: rest // 2} if rest > 0 and rest % 2 == 0 else None


def _take_apart(made: dict[str, tuple[int, ...]], at: str, name: str, widths: Mapping[str, int]) -> None:
    inputs, _ = made.pop(f"{at}.{name}")
    has_bias = made.pop(f"{at}.{name}.bias", None) is not None
    for part, width in widths.items():
        made[f"{at}.{part}"] = inputs, width
        if has_bias:
            made[f"{at}.{part}.bias"] = (width,)


def _join(made: dict[str, tuple[int, ...]], at: str, name: str, widths: Mapping[str, int]) -> None:
    inputs = {made.pop(f"{at}.{part}")[0] for part in widths}
    biases = [made.pop(f"{at}.{part}.bias", None) for part in widths]
    made[f"{at}.{name}"] = inputs.pop(), sum(widths.values())
    if all(biases):
        made[f"{at}.{name}.bias"] = (sum(widths.values()),)
