"""The panel layout of a matrix: panels of 16 output columns, which the CPU kernels read sequentially.

    float32    [out / 16][in][16]
    bfloat16   [out / 16][in / 2][16][2]

A panel holds 16 output columns over the whole depth. In bfloat16 two depth elements are adjacent, as the processors'
dot product instructions take them. Columns past the last are zero, and so is the padding that makes an odd depth even.
"""

from __future__ import annotations

import torch

LANES = 16


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Lay out `weight` [out, in] as [panels, steps, 16, 1 or 2] of the same dtype."""
    return as_panels(weight).contiguous()


def as_panels(weight: torch.Tensor) -> torch.Tensor:
    """View `weight` in panels: like `to_panels`, but copied only if it needs padding."""
    step = _step(weight.dtype)
    return in_steps(weight, -(-weight.shape[1] // step) * step, step)


def in_steps(weight: torch.Tensor, padded_depth: int, step: int) -> torch.Tensor:
    """View `weight` [out, in] as [panels, padded_depth / step, 16, step], padded with zeros if necessary."""
    out, depth = weight.shape
    padding = (0, padded_depth - depth, 0, -out % LANES)
    padded: torch.Tensor = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    return padded.reshape(-1, LANES, padded_depth // step, step).transpose(1, 2)


def panel_numel(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return how many elements the panels of an [out, depth] matrix have."""
    (out, depth), step = shape, _step(dtype)
    return -(-out // LANES) * LANES * (-(-depth // step) * step)


def _step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
