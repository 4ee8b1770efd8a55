from __future__ import annotations

import torch
from torch.nn import functional

from kernels.rope_attention.reference import rope_attention


def test_it_is_attention_to_what_has_been_written_and_to_the_newest_key() -> None:
    """Two rows in blocks of four, without norms and rotated by nothing: torch's attention of the same numbers."""
    heads, kv_heads, dim = 4, 2, 8
    keys, values = (torch.randn(2, 7, kv_heads, dim) for _ in range(2))
    caches = [torch.full((5, 4, kv_heads, dim), torch.nan) for _ in range(2)]
    tables, positions = [[3, 0], [1, 4]], [6, 4]
    for cache, numbers in zip(caches, (keys, values), strict=True):
        for row, table in enumerate(tables):
            for position in range(positions[row]):
                cache[table[position // 4], position % 4] = numbers[row, position]
    q = torch.randn(2, heads, dim)
    newest = [numbers[range(2), positions] for numbers in (keys, values)]
    found = rope_attention(
        qkv=torch.cat([part.flatten(1) for part in (q, *newest)], dim=1),
        cos_sin=torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(2, 2, dim),
        norms=None,
        eps=0.0,
        k_cache=caches[0],
        v_cache=caches[1],
        slots=torch.tensor([0 * 4 + 6 % 4, 4 * 4 + 4 % 4]),
        block_tables=tables,
        positions=positions,
    )
    for row, position in enumerate(positions):
        k, v = (numbers[row, : position + 1].transpose(0, 1) for numbers in (keys, values))
        expected = functional.scaled_dot_product_attention(q[row].unsqueeze(1), k, v, enable_gqa=True)
        torch.testing.assert_close(found[row], expected[:, 0])
