"""The selective scan of Mamba2: a per-head state matrix that decays and takes up each token by an outer product.

For each token of a row in turn:

    S <- exp(a dt) S + (dt x) b^T
    y  = S c + d x

Each group of b and c serves several adjacent heads, which have a state each.

Source: Dao and Gu, 2024, Transformers are SSMs, arXiv 2405.21060, equation 2 and section 7.
"""

from __future__ import annotations

import torch


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return y [rows, tokens, heads, head_dim] in the dtype of `x`, and update the state in place.

    Args:
        x: shaped like y.
        dt: [rows, tokens, heads], how far each token moves time: biased, made positive and clamped.
        a: [heads], negative.
        b, c: [rows, tokens, groups, state_dim]; `groups` divides `heads`.
        d: [heads]; None for zeros.
        state: [rows, heads, head_dim, state_dim], float32 or wider.
    """
    wide, share = state.dtype, x.shape[2] // b.shape[2]
    b, c = (part.to(wide).repeat_interleave(share, dim=2) for part in (b, c))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for token in range(x.shape[1]):
        inputs, step = x[:, token].to(wide), dt[:, token, :, None].to(wide)
        state.mul_((step * a.to(wide)[:, None]).exp().unsqueeze(-1))
        state.add_((step * inputs).unsqueeze(-1) * b[:, token, :, None])
        read = (state * c[:, token, :, None]).sum(dim=-1)
        y[:, token] = read if d is None else read + d.to(wide)[:, None] * inputs
    return y
