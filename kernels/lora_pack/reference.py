"""LoRA pack: converts an adapter's matrices from their file's layout to the layouts that the CPU kernels read.

    out = m                        AS_IS           [rows, columns]
    out = m^T                      TRANSPOSED      [columns, rows]
    out = panels(m * factor * g)   PANELS          as `kernels.packed_linear.reference.to_panels` lays them out

`g` [rows] multiplies each row; arithmetic is in float32, and results are rounded once, to the engine's dtype.
"""

from __future__ import annotations

import enum

import torch

from kernels.packed_linear.reference import panel_numel, to_panels


class Form(enum.IntEnum):
    """A matrix layout; the kernel identifies it by number."""

    AS_IS = 0
    TRANSPOSED = 1
    PANELS = 2


def lora_pack(
    *, matrix: torch.Tensor, form: Form, dtype: torch.dtype, factor: float = 1.0, gain: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `matrix` [rows, columns] (float32, float16 or bfloat16) flat, in the given layout and dtype."""
    if form is Form.AS_IS:
        return matrix.to(dtype).flatten()
    if form is Form.TRANSPOSED:
        return matrix.T.to(dtype).flatten()
    scaled = matrix.to(torch.float32) * factor
    return to_panels((scaled if gain is None else scaled * gain[:, None]).to(dtype)).flatten()


def packed_numel(shape: torch.Size, form: Form, dtype: torch.dtype) -> int:
    """Return how many elements a packed matrix takes."""
    return panel_numel(shape, dtype) if form is Form.PANELS else shape.numel()
