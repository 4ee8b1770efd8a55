"""An int8 linear product: weights have a scale per output column, inputs a scale per row.

Quantization is symmetric, round-to-nearest; weights are quantized once, inputs dynamically (LLM.int8(), Dettmers et
al., 2022, arXiv 2208.07339, section 2.1, "vector-wise quantization", without its outlier columns). Sums are exact in
int32 up to 133,000 inputs.
"""

from __future__ import annotations

import torch

from kernels.packed_linear.reference import in_steps

STEP, TILE_DEPTH = 4, 64
HIGHEST = 127


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, depth] as int8 and the scales float32 [rows]; the scale of a row that is not finite is NaN."""
    wide = x.float()
    top = wide.abs().amax(dim=1)
    scales = top / HIGHEST + (wide * 0).sum(dim=1)
    # Divides tensors, because torch divides a scalar by a tensor as scalar * reciprocal, which rounds twice.
    inverse = torch.where((top > 0) & scales.isfinite(), torch.full_like(top, HIGHEST) / top, 0.0)
    # Rounded once, like a fused multiply-add, so that products near a tie round the same way everywhere.
    exact = wide.double().mul_(inverse.double()[:, None])
    return exact.nan_to_num_().round_().to(torch.int8), scales


def packed_linear_int8(
    x: torch.Tensor, weight: torch.Tensor, column_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply x [rows, in] by an int8 weight [out, in] with float32 scales [out]; return [rows, out] in x's dtype."""
    q, row_scales = quantize_rows(x)
    sums = (q.double() @ weight.double().T).float()
    y = sums * row_scales[:, None] * column_scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


def padded_depth(depth: int) -> int:
    """Return the depth of the panels: the next multiple of a tile's depth."""
    return -(-depth // TILE_DEPTH) * TILE_DEPTH


def to_int8_panels(weight: torch.Tensor) -> torch.Tensor:
    """Lay out an int8 `weight` [out, in] as [panels, padded / 4, 16, 4], padded with zeros."""
    return in_steps(weight, padded_depth(weight.shape[1]), STEP).contiguous()
