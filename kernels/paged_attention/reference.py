"""Attention over a paged KV cache, defined token by token.

    out[t, h] = softmax_j( scale * q[t, h] . K[j, h'] ) V[j, h'],    j = 0 .. position(t),  h' = h / (H / H_kv)

With a window the first j is max(0, position(t) - window + 1); with a soft cap c a score s becomes c tanh(s / c). A sink
of head h is one more score in its softmax, with a value of zeros: it takes a share of the weights and adds nothing.

Here K[j] is the cache at block_table[row(t)][j / block_tokens], slot j % block_tokens. Slots past a token's own
position are never read, whatever they contain.

Sources: Kwon et al., 2023 (PagedAttention, arXiv 2309.06180, section 4.1); OpenAI, 2025 (gpt-oss model card, arXiv
2508.10925, section 2.2: sinks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.row_quantization.reference import dequantize_rows


def paged_attention(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    ends: Sequence[int],
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for rows whose tokens are consecutive in `q`.

    Args:
        q: [tokens, heads, head_dim]; row r has the positions starts[r] .. ends[r] - 1.
        k_cache, v_cache: [num_blocks, block_tokens, kv_heads, head_dim], including the rows' own keys and values.
        block_tables: block ids of each row, enough for `ends` positions.
        scale: None for 1 / sqrt(head_dim).
        window: how many of the last positions a token sees, its own included; 0 for all.
        softcap: 0 for no cap.
        spans: for an 8-bit cache, as `kernels.rope_kv_write.reference` writes them; None for others.
        sinks: [heads]; None for none.

    Returns:
        [tokens, heads, head_dim] in the dtype of `q`, computed in float64.
    """
    if spans is not None:
        k_cache, v_cache = dequantize_rows(k_cache, spans[0]), dequantize_rows(v_cache, spans[1])
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // kv_heads
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.empty_like(q)
    token = 0
    for table, start, end in zip(block_tables, starts, ends, strict=True):
        for position in range(start, end):
            first = max(0, position - window + 1) if window else 0
            slots = [(table[j // block_tokens], j % block_tokens) for j in range(first, position + 1)]
            k = torch.stack([k_cache[block, slot] for block, slot in slots]).double()  # [position + 1, kv_heads, dim]
            v = torch.stack([v_cache[block, slot] for block, slot in slots]).double()
            for head in range(q.shape[1]):
                scores = k[:, head // group] @ q[token, head].double() * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: len(slots)]
                out[token, head] = (weights @ v[:, head // group]).to(q.dtype)
            token += 1
    return out
