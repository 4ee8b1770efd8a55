"""From a layer's QKV projection to its attention output, for single-token rows, composed of two definitions.

q <- rope_kv_write(qkv)            `kernels.rope_kv_write.reference`: keys and values are in the cache
out = paged_attention(q)           `kernels.paged_attention.reference`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.paged_attention.reference import paged_attention
from kernels.rope_kv_write.reference import rope_kv_write


def rope_attention(
    *,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    positions: Sequence[int],
) -> torch.Tensor:
    """Write the keys and values of single-token rows and attend; arguments and result as in the two definitions."""
    q = rope_kv_write(qkv=qkv, cos_sin=cos_sin, norms=norms, eps=eps, k_cache=k_cache, v_cache=v_cache, slots=slots)
    ends = [position + 1 for position in positions]
    return paged_attention(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, starts=positions, ends=ends
    )
