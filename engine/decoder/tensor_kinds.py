"""The shapes and dtypes that a checkpoint tensor may have, checked before any tensor data is read."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The allowed shapes, None for any shape, and the allowed dtypes, by their safetensors names."""

    shapes: tuple[Shape, ...] | None
    dtypes: tuple[str, ...] = FLOATS


def scale_shapes(out: int, has_each: bool) -> tuple[Shape, ...]:
    """Return the allowed shapes of scales: per output if `has_each`, otherwise per tensor."""
    return ((out, 1), (out,)) if has_each else ((), (1,))
