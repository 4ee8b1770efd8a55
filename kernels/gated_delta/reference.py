"""The gated delta rule: a per-head state matrix that decays and is corrected by the error of the value it predicts.

For each token of a row in turn, with k = norm(k) and q = norm(q) / sqrt(key_dim), norm(x) = x / sqrt(|x|^2 + eps):

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    o  = S^T q

Each query and key head serves several adjacent value heads, which have a state each.

Source: Yang et al., 2024, Gated Delta Networks, arXiv 2412.06464, equation 10.
"""

from __future__ import annotations

import torch

EPS = 1e-6


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Return o [rows, tokens, heads, value_dim] in the dtype of `v`, and update the state in place.

    Args:
        q, k: [rows, tokens, key_heads, key_dim]; `key_heads` divides `heads`.
        v: [rows, tokens, heads, value_dim].
        g, beta: [rows, tokens, heads].
        state: [rows, heads, key_dim, value_dim], float32 or wider.
    """
    wide, share = state.dtype, v.shape[2] // k.shape[2]
    q, k = (_normed(x.to(wide)).repeat_interleave(share, dim=2) for x in (q, k))
    out = torch.empty_like(v)
    for token in range(v.shape[1]):
        keys, values = k[:, token, :, :, None], v[:, token, :, None].to(wide)
        state.mul_(g[:, token, :, None, None].to(wide).exp())
        told = (state * keys).sum(dim=2, keepdim=True)
        state.add_(keys * (beta[:, token, :, None, None].to(wide) * (values - told)))
        out[:, token] = (state * q[:, token, :, :, None]).sum(dim=2) * k.shape[-1] ** -0.5
    return out


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + EPS).rsqrt()
