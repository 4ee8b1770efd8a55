from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.reference import paged_attention


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Textbook attention of one row: q [tokens, heads, dim], k and v [context, kv_heads, dim]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("thd,chd->htc", q, k) / q.shape[2] ** 0.5
    visible = torch.arange(k.shape[0]) <= torch.arange(start, start + q.shape[0]).unsqueeze(1)
    return torch.einsum("htc,chd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_paged_row_is_a_dense_row(block_tokens: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start, end, num_blocks = 5, 11, 20
    k = torch.randn(end, kv_heads, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(end, kv_heads, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(end - start, 4, 8, generator=generator, dtype=torch.float64)
    table = torch.randperm(num_blocks, generator=generator)[: -(-end // block_tokens)].tolist()
    k_cache = torch.full((num_blocks, block_tokens, kv_heads, 8), torch.nan, dtype=torch.float64)
    v_cache = k_cache.clone()
    for position in range(end):
        block, slot = table[position // block_tokens], position % block_tokens
        k_cache[block, slot], v_cache[block, slot] = k[position], v[position]
    found = paged_attention(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=[table], starts=[start], ends=[end])
    torch.testing.assert_close(found, dense(q, k, v, start))


def test_a_sink_is_a_key_of_its_own_score_whose_value_is_zeros() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    cache = {"k_cache": k.unsqueeze(0), "v_cache": v.unsqueeze(0), "block_tables": [[0]], "starts": [3], "ends": [4]}
    sinks = torch.tensor([0.7, -1.3], dtype=torch.float64)
    found = paged_attention(q=q[3:], sinks=sinks, **cache)
    weights = (torch.einsum("hd,chd->hc", q[3], k) / 8**0.5).exp()
    shares = weights / (weights.sum(1) + sinks.exp()).unsqueeze(1)
    torch.testing.assert_close(found[0], torch.einsum("hc,chd->hd", shares, v))


def test_no_rows_are_no_output() -> None:
    empty = torch.empty(0, 2, 4)
    cache = torch.zeros(1, 2, 1, 4)
    assert paged_attention(q=empty, k_cache=cache, v_cache=cache, block_tables=[], starts=[], ends=[]).shape == (
        0,
        2,
        4,
    )
