"""Splits a layer's QKV projection, norms and rotates queries and keys, and writes keys and values to the KV cache.

    q, k, v  = split(qkv[t])                       heads of head_dim each: H, H_kv, H_kv
    q, k     = norm(q), norm(k)                    if the model has such norms (Qwen3)
    q, k     = rotate(q, t), rotate(k, t)          pairs (i, i + half), half = rotary_dim / 2; the rest of a head stays
    cache[slot(t)] <- k, v

    rotate(x)[i] = x[i] * cos[i] - x[i + half] * sin[i],   rotate(x)[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]

Source: Su et al., 2021 (RoFormer, arXiv 2104.09864, section 3.2), in the layout of transformers.
"""  # noqa: E501

from __future__ import annotations

import torch

from kernels.add_rms_norm.reference import add_rms_norm
from kernels.row_quantization.reference import quantize_rows


def rope_kv_write(
    *,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    rotary_dim: int | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Write keys and values and return the queries.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim].
        cos_sin: [tokens, 2, head_dim]; 1 and 0 for dimensions that do not rotate.
        norms: weights of the query and key norms, [head_dim], or per token [tokens, head_dim]; None for no norms.
        k_cache, v_cache: [num_blocks, block_tokens, kv_heads, head_dim]; other slots are not touched.
        slots: the slot mapping, [tokens] int64, distinct: block * block_tokens + offset in the block.
        rotary_dim: how many leading dimensions of a head rotate; None for all.
        spans: for an 8-bit cache, the spans of keys and values, float32 [num_blocks, block_tokens, kv_heads] each; None
            if the cache is not quantized. See `kernels.row_quantization.reference`.

    Returns:
        [tokens, heads, head_dim].
    """
    kv_heads, head_dim = k_cache.shape[-2:]
    kv_size = kv_heads * head_dim
    q, k, v = (
        part.unflatten(-1, (-1, head_dim)) for part in qkv.split((qkv.shape[1] - 2 * kv_size, kv_size, kv_size), dim=-1)
    )
    if norms is not None:
        q, k = _normed(q, norms[0], eps), _normed(k, norms[1], eps)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    q, rotated = rotate(q, cos_sin, rotary_dim), rotate(k, cos_sin, rotary_dim)
    # Not flattened, because blocks may not be contiguous.
    at = slots // k_cache.shape[1], slots % k_cache.shape[1]
    if spans is None:
        k_cache[at], v_cache[at] = rotated, v
        return q
    for cache, part_spans, part in ((k_cache, spans[0], rotated), (v_cache, spans[1], v)):
        cache[at], part_spans[at] = quantize_rows(part, cache.dtype)
    return q


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Rotate the heads `x` [tokens, heads, head_dim]; other arguments as in `rope_kv_write`."""
    half, still = rotary_dim // 2, x[..., rotary_dim:]
    swapped = torch.cat((-x[..., half:rotary_dim], x[..., :half], still), dim=-1)
    return x * cos_sin[:, :1] + swapped * cos_sin[:, 1:]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dim() == 1:
        return add_rms_norm(x, None, weight, eps)
    return torch.stack([add_rms_norm(heads, None, own, eps) for heads, own in zip(x, weight, strict=True)])
