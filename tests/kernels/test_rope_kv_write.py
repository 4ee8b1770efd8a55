from __future__ import annotations

import pytest
import torch

from kernels.program import Pool
from kernels.rope_kv_write.reference import rope_kv_write
from tests.kernels.conftest import DTYPES, assert_near
from tests.oracles.plain_matrices import from_panels

HEADS, KV_HEADS, BLOCKS = 4, 2, 5


def test_a_rotation_turns_pairs_of_halves() -> None:
    angles = torch.tensor([0.3, 0.7])
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos)), torch.cat((sin, sin)))).unsqueeze(0)
    cache = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    qkv = torch.arange(12.0).unsqueeze(0)
    found = rope_kv_write(
        qkv=qkv, cos_sin=table, norms=None, eps=0, k_cache=cache[0], v_cache=cache[1], slots=torch.tensor([0])
    )
    for place, x in ((found[0, 0], qkv[0, :4]), (cache[0][0, 0, 0], qkv[0, 4:8])):
        first, second = x[:2], x[2:]
        torch.testing.assert_close(place, torch.cat((first * cos - second * sin, second * cos + first * sin)))
    assert torch.equal(cache[1][0, 0, 0], qkv[0, 8:])


def cache_of_panels(data: torch.Tensor, dim: int, block_tokens: int, *, is_values: bool) -> torch.Tensor:
    """Read a cache in panels as [block, token, kv head, dim]."""
    groups = data.reshape(BLOCKS, KV_HEADS, block_tokens // 16, 16 * dim)
    step = 2 if data.dtype == torch.bfloat16 else 1
    out = torch.empty(BLOCKS, block_tokens, KV_HEADS, dim, dtype=data.dtype)
    for block in range(BLOCKS):
        for head in range(KV_HEADS):
            for group in range(block_tokens // 16):
                panels, tokens = groups[block, head, group], slice(16 * group, 16 * group + 16)
                if is_values:
                    # Columns are the head's width, the depth is the tokens.
                    out[block, tokens, head] = from_panels(panels.view(dim // 16, 16 // step, 16, step), dim, 16).T
                else:
                    out[block, tokens, head] = from_panels(panels.view(1, dim // step, 16, step), 16, dim)
    return out


SCATTERED = torch.randperm(BLOCKS * 16, generator=torch.Generator().manual_seed(0))[:19]
RUNS = torch.cat([torch.arange(*ends) for ends in ((67, 96), (1, 2), (5, 31), (33, 34), (97, 160), (34, 66))])
"""Tokens side by side in panels, from odd and even places on, over the ends of panels, blocks and units."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms_are", ["absent", "of the dtype", "float32"])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "block_tokens", "slots"),
    [
        (16, 16, 16, SCATTERED),
        (48, 48, 32, SCATTERED),
        (64, 64, 16, SCATTERED),
        (64, 48, 32, SCATTERED),
        (32, 10, 16, SCATTERED),
        (32, 10, 32, SCATTERED),
        (64, 64, 32, RUNS),
        (48, 16, 32, RUNS),
    ],
)
def test_the_kernel_is_the_reference(
    pool: Pool, dtype: torch.dtype, norms_are: str, dim: int, rotary_dim: int, block_tokens: int, slots: torch.Tensor
) -> None:
    tokens = len(slots)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * dim).to(dtype)
    cos_sin = torch.randn(tokens, 2, dim).to(dtype)
    cos_sin[:, :, rotary_dim:] = torch.tensor([1.0, 0.0])[:, None]
    is_wide = norms_are == "float32"
    norm_dtype = torch.float32 if is_wide else dtype
    norms = None if norms_are == "absent" else (torch.randn(dim).to(norm_dtype), torch.randn(dim).to(norm_dtype))
    expected_cache = [torch.full((BLOCKS, block_tokens, KV_HEADS, dim), 7.0, dtype=dtype) for _ in range(2)]
    # Blocks lie apart, as they do in a cache of several layers.
    apart = torch.full((BLOCKS, 3, block_tokens, KV_HEADS, dim), 7.0, dtype=dtype)
    found_cache = [apart[:, 0], apart[:, 2]]
    expected = rope_kv_write(
        qkv=qkv,
        cos_sin=cos_sin,
        norms=norms,
        eps=1e-6,
        k_cache=expected_cache[0],
        v_cache=expected_cache[1],
        slots=slots,
        rotary_dim=rotary_dim,
    )
    found = torch.empty(tokens, HEADS, dim, dtype=dtype)
    tensors = (qkv, cos_sin, *(norms or (None, None)), *found_cache, slots, found)
    sizes = (HEADS, KV_HEADS, dim, block_tokens, apart.stride(0), is_wide, rotary_dim)
    pool.call("rope_kv_write", dtype, tokens, tensors, sizes, (1e-6,))
    assert_near(found, expected)
    assert_near(cache_of_panels(found_cache[0], dim, block_tokens, is_values=False), expected_cache[0])
    assert torch.equal(cache_of_panels(found_cache[1], dim, block_tokens, is_values=True), expected_cache[1])
    assert apart[:, 1].eq(7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_adapters_with_norms_of_their_own_are_normed_by_those(pool: Pool, dtype: torch.dtype) -> None:
    """Segments with gains of both norms, of one and of none, neighbours and not; the base beside them."""
    tokens, dim, block_tokens, entry = 40, 32, 16, 2
    qkv, cos_sin = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * dim).to(dtype), torch.randn(tokens, 2, dim).to(dtype)
    norms = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    slots = torch.randperm(BLOCKS * block_tokens)[:tokens]
    gains = torch.rand(2, 2, dim) + 0.5
    tables = torch.zeros(3, entry + 2, 5, dtype=torch.int64)
    tables[0, entry:, 3] = torch.tensor([gains[0, 0].data_ptr(), gains[0, 1].data_ptr()])
    tables[1, entry + 1, 3] = gains[1, 1].data_ptr()
    spans = [(2, 5), (5, 21), (24, 30)]
    segments = torch.tensor([[*span, tables[n].data_ptr()] for n, span in enumerate(spans)])
    own = [norm.repeat(tokens, 1) for norm in norms]
    own[0][2:5], own[1][2:5] = (norms[0].float() * gains[0, 0]).to(dtype), (norms[1].float() * gains[0, 1]).to(dtype)
    own[1][5:21] = (norms[1].float() * gains[1, 1]).to(dtype)
    cache = [torch.zeros(BLOCKS, block_tokens, KV_HEADS, dim, dtype=dtype) for _ in range(4)]
    expected = rope_kv_write(
        qkv=qkv, cos_sin=cos_sin, norms=(own[0], own[1]), eps=1e-6, k_cache=cache[0], v_cache=cache[1], slots=slots
    )
    for count in (3, 0):
        found = torch.empty(tokens, HEADS, dim, dtype=dtype)
        tensors = (qkv, cos_sin, *norms, *cache[2:], slots, found, segments, torch.tensor([count]))
        sizes = (HEADS, KV_HEADS, dim, block_tokens, cache[0].stride(0), False, dim, entry)
        pool.call("rope_kv_write", dtype, tokens, tensors, sizes, (1e-6,))
        if count:
            assert_near(found, expected)
            assert_near(cache_of_panels(cache[2], dim, block_tokens, is_values=False), cache[0])
    without = rope_kv_write(
        qkv=qkv, cos_sin=cos_sin, norms=norms, eps=1e-6, k_cache=cache[0], v_cache=cache[1], slots=slots
    )
    assert_near(found, without)
