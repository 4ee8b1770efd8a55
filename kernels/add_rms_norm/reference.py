"""The residual sum and the RMS norm that follows it, in one pass.

    x[t] <- x[t] + delta[t]
    h[t] =  weight * x[t] / sqrt(mean_i x[t, i]^2 + eps)

The sum is rounded to the dtype of `x` before it is squared; squares and mean are float32; the quotient is rounded to
the dtype of the weight before the two are multiplied. Most model families keep weights in the dtype of `x`; others have
float32 weights, so that the norm is float32 to the end.

Source: Zhang and Sennrich, 2019 (RMSNorm, arXiv 1910.07467, equation 4).
"""

from __future__ import annotations

import torch


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Add `delta` to `x` in place and return the norm of the sum.

    Args:
        x: [rows, width]; changed, unless `delta` is None.
        delta: [rows, width] or None.
        weight: [width], in the dtype of `x` or float32; None for the sum alone.

    Returns:
        [rows, width] in the dtype of `x`; `x` itself if there is no weight.
    """
    if delta is not None:
        x.add_(delta)
    if weight is None:
        return x
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * quotient.to(weight.dtype)).to(x.dtype)
