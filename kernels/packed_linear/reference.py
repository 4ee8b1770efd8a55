"""A matrix in panels of 16 output columns, the layout that the CPU's products read from end to end.

    float32    [out / 16][in][16]
    bfloat16   [out / 16][in / 2][16][2]

A panel holds 16 columns of the output over the whole depth; bfloat16 keeps two steps of the depth side by side, as the
processors' dot products take them. Columns past the last are zero, and so is the step that makes an odd depth even.
"""

from __future__ import annotations

import torch

LANES = 16


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Lay out `weight` [out, in]; returns [panels, steps, 16, 1 or 2] of the same dtype."""
    return as_panels(weight).contiguous()


def as_panels(weight: torch.Tensor) -> torch.Tensor:
    """See `weight` in panels: `to_panels`, but copied only where there is something to pad."""
    step = _step(weight.dtype)
    return in_steps(weight, -(-weight.shape[1] // step) * step, step)


def in_steps(weight: torch.Tensor, padded_depth: int, step: int) -> torch.Tensor:
    """See `weight` [out, in] as [panels, padded_depth / step, 16, step], zeros where there is no weight."""
    out, depth = weight.shape
    padding = (0, padded_depth - depth, 0, -out % LANES)
    padded: torch.Tensor = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    return padded.reshape(-1, LANES, padded_depth // step, step).transpose(1, 2)


def from_panels(panels: torch.Tensor, out: int, depth: int) -> torch.Tensor:
    """Undo `to_panels`; returns [out, depth]."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:out, :depth]


def panel_numel(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return how many elements the panels of an [out, depth] matrix have."""
    (out, depth), step = shape, _step(dtype)
    return -(-out // LANES) * LANES * (-(-depth // step) * step)


def _step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
