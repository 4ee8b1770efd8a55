"""`kernels.rope_kv_write.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.overlap import overlap
from kernels.paged_attention.launch import room_of_tokens
from kernels.rope_kv_write.kernel import rope_kv_write_kernel
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

BLOCK_HEADS = 16
FEW_TOKENS, BLOCK_HEADS_OF_FEW = 16, 4
"""With few tokens, more programs with fewer heads each run in parallel."""


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
    """Write keys and values and return the queries. Arguments as in the reference, contiguous but for the cache.

    The cache is as in `kernels.paged_attention.launch`.

    Per-token norms may have a row stride larger than their width, the same for both.

    A negative slot marks a padding token, whose key and value are not written.
    """
    kv_heads, head_dim = k_cache.shape[-2:]
    tokens = len(qkv)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        block_heads = BLOCK_HEADS_OF_FEW if tokens <= FEW_TOKENS else BLOCK_HEADS
        rope_kv_write_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, block_heads))](
            qkv,
            cos_sin,
            qkv if norms is None else norms[0],
            qkv if norms is None else norms[1],
            k_cache,
            v_cache,
            *(spans or (slots, slots)),
            slots,
            q,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=head_dim if rotary_dim is None else rotary_dim,
            HAS_NORMS=norms is not None,
            NORM_STRIDE=0 if norms is None or norms[0].dim() == 1 else norms[0].stride(0),
            LIMIT=0.0 if spans is None else LIMIT_BY_DTYPE[k_cache.dtype],
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            **room_of_tokens(k_cache, spans),
            **overlap(),
        )
    return q
