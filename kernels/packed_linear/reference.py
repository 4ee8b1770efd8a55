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
    step = _step(weight.dtype)
    out, depth = weight.shape
    padded: torch.Tensor = torch.nn.functional.pad(weight, (0, -depth % step, 0, -out % LANES))
    return padded.view(-1, LANES, padded.shape[1] // step, step).transpose(1, 2).contiguous()


def from_panels(panels: torch.Tensor, out: int, depth: int) -> torch.Tensor:
    """Undo `to_panels`; returns [out, depth]."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:out, :depth]


def panel_numel(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return how many elements the panels of an [out, depth] matrix have."""
    (out, depth), step = shape, _step(dtype)
    return -(-out // LANES) * LANES * (-(-depth // step) * step)


def _step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
