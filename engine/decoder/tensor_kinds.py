"""What a tensor of a checkpoint may be: looked at before the first of its bytes is read."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Any of some shapes, None for any at all, and any of some types, by safetensors' names for them."""

    shapes: tuple[Shape, ...] | None
    dtypes: tuple[str, ...] = FLOATS
