"""Logits from a vocabulary in bytes, in groups of inputs that share a scale, and its rows as embeddings.

    logits = x W^T,        W[o, i] = scale[o, g] * level[o, i],        g = i // group

Levels are integers from -127 to 127. Inputs are not quantized and levels are exact in bfloat16: a group's sum is
multiplied by its scale in float32, and nothing is rounded, except as in `kernels.packed_linear_int4.reference`.

    panels    [out / 16][in / 4][16]    a 32-bit word holds four inputs of an output: 0, 2 from the lowest bits up, 1, 3
                                        from bit 16 up, so that pairs unpack into halves of bfloat16

Rounding is symmetric and to the nearest, as in `kernels.packed_linear_int8.reference`.
"""

from __future__ import annotations

import torch

from kernels.packed_linear.reference import in_steps

STEP = 4
PLACES = (0, 2, 1, 3)
"""Position of each of the four inputs in a word, in bytes."""
HIGHEST = 127


def packed_logits_int8(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [rows, in] by int8 levels [out, in] and float32 scales [out, in / group]: float32 [rows, out]."""
    return (x.double() @ _dequantized(levels, scales).T).float()


def embed_int8(ids: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `ids` [rows] of the matrix as [rows, in] in `dtype`."""
    return _dequantized(levels[ids], scales[ids]).float().to(dtype)


def to_bytes(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels [out, in] of a matrix and scales [out, in / group]; the scale of what is not finite is NaN."""
    wide = weight.float().view(len(weight), -1, group)
    top = wide.abs().amax(dim=2)
    # Divides tensors, because torch divides by a scalar as it multiplies by its reciprocal, which rounds twice.
    scales = top / torch.full_like(top, HIGHEST)
    steps = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    levels = (wide / steps).round_().clamp_(-HIGHEST, HIGHEST)
    is_finite = wide.isfinite().all(dim=2)
    levels = torch.where(is_finite.unsqueeze(-1), levels, 0.0)
    return levels.to(torch.int8).view_as(weight), torch.where(is_finite, scales, torch.nan)


def to_byte_panels(levels: torch.Tensor) -> torch.Tensor:
    """Lay out int8 levels [out, in] as int32 [panels, in / 4, 16]; `STEP` divides the number of inputs."""
    fours = in_steps(levels, levels.shape[1], STEP)
    return fours[..., PLACES].contiguous().view(torch.int32).squeeze(-1)


def _dequantized(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    steps = levels.view(*scales.shape, -1).double()
    return (steps * scales.double().unsqueeze(-1)).view(levels.shape)
