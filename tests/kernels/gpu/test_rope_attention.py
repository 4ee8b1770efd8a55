"""A row or two from product to attention in one pass, against the two definitions that it stands for."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.paged_attention.launch import counters
from kernels.rope_attention import launch
from kernels.rope_attention.reference import rope_attention
from tests.kernels.gpu.conftest import DEVICE, SHORT, assert_near, randn

EPS = 1e-6


def check(
    positions: list[int],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    has_norms: bool,
    block_tokens: int = 16,
    num_fillers: int = 0,
    cut: launch.AttentionCut = launch.USUAL,
) -> None:
    """Compare results and caches in which older tokens of the rows hold numbers, and all else is NaN."""
    counts = [position // block_tokens + 1 for position in positions]
    order = torch.randperm(sum(counts) + 2).tolist()
    k = torch.full((len(order), block_tokens, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    v = k.clone()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    slots = []
    for position, table in zip(positions, tables, strict=True):
        at = torch.tensor([table[p // block_tokens] * block_tokens + p % block_tokens for p in range(position + 1)])
        for cache in (k, v):
            cache.flatten(0, 1)[at[:-1].to(DEVICE)] = randn(position, kv_heads, dim, dtype=dtype)
        slots.append(int(at[-1]))
    num_rows = len(positions) + num_fillers
    angles = randn(num_rows, dim, dtype=torch.float32)
    gains = 1 + 0.1 * randn(2, dim, dtype=dtype)
    product = {
        "qkv": randn(num_rows, (heads + 2 * kv_heads) * dim, dtype=dtype),
        "cos_sin": torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype),
        "norms": (gains[0], gains[1]) if has_norms else None,
    }
    padded = torch.zeros(num_rows, max(counts) + 1, dtype=torch.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)
    rows = [[row, position, 1, row] for row, position in enumerate(positions)]
    rows += [[len(positions) + filler, 0, 0, 0] for filler in range(num_fillers)]
    found_k, found_v = (_apart(cache) for cache in (k, v))
    assert launch.can_attend(product["qkv"], k)
    arrived = counters(DEVICE)
    found = launch.rope_attention(
        **product,
        eps=EPS,
        k_cache=found_k,
        v_cache=found_v,
        slots=torch.tensor([*slots, *[-1] * num_fillers], device=DEVICE),
        rows=torch.tensor(rows, device=DEVICE),
        tables=padded.to(DEVICE),
        arrived=arrived,
        cut=cut,
    )
    # On the host: the reference takes positions one by one.
    wide = {name: given if given is None else _wide(given) for name, given in product.items()}
    expected_k, expected_v = k.double().cpu(), v.double().cpu()
    expected = rope_attention(
        **{name: given[: len(positions)] if name != "norms" else given for name, given in wide.items()},
        eps=EPS,
        k_cache=expected_k,
        v_cache=expected_v,
        slots=torch.tensor(slots),
        block_tables=tables,
        positions=positions,
    )
    assert not arrived.any()
    assert_near(found[: len(positions)], expected.to(DEVICE))
    for found_cache, meant, before in ((found_k, expected_k.to(DEVICE), k), (found_v, expected_v.to(DEVICE), v)):
        at = torch.tensor(slots, device=DEVICE)
        assert_near(found_cache.flatten(0, 1)[at], meant.flatten(0, 1)[at])
        # Nothing else was written.
        found_cache.flatten(0, 1)[at] = before.flatten(0, 1)[at]
        assert torch.equal(found_cache.view(torch.int16), before.view(torch.int16))


def _apart(cache: torch.Tensor) -> torch.Tensor:
    """Copy a cache to one whose tokens are further apart, because it has wider layers too."""
    width = cache.shape[2] * cache.shape[3]
    whole = torch.full((*cache.shape[:2], width + cache.shape[3]), torch.nan, dtype=cache.dtype, device=cache.device)
    return whole[..., :width].unflatten(-1, cache.shape[2:]).copy_(cache)


def _wide(given: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
    return given.double().cpu() if isinstance(given, torch.Tensor) else tuple(part.double().cpu() for part in given)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("splits", "has_norms"), [(1, True), (2, False), (32, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (1, 1, 80), (8, 2, 128), (3, 1, 16)])
def test_rows_of_every_length(
    dtype: torch.dtype,
    splits: int,
    heads: int,
    kv_heads: int,
    dim: int,
    has_norms: bool,
) -> None:
    """The newest key alone in a tile, and last in one; a row of one tile; splits that nothing is left for."""
    cut = replace(launch.USUAL, num_splits=splits)
    for positions in ([64, 63], [0], [300, 129]):
        fillers = launch.MAX_ROWS - len(positions)
        check(
            positions,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            dtype=dtype,
            has_norms=has_norms,
            num_fillers=fillers,
            cut=cut,
        )


@settings(deadline=None, max_examples=15)
@given(
    positions=st.lists(st.integers(0, 400), min_size=1, max_size=2),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.integers(4, 16),
    block_tokens=st.sampled_from([1, 3, 16]),
    has_norms=st.booleans(),
    cut=st.builds(
        launch.AttentionCut,
        heads=st.sampled_from([1, 2, 4]),
        num_splits=st.sampled_from([1, 2, 4, 32]),
        depth=st.sampled_from([1, 4]),
        num_warps=st.sampled_from([1, 4]),
    ),
)
def test_any_rows_and_any_cut(
    positions: list[int],
    group: int,
    kv_heads: int,
    half: int,
    block_tokens: int,
    has_norms: bool,
    cut: launch.AttentionCut,
) -> None:
    check(
        positions,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=2 * half,
        dtype=torch.bfloat16,
        has_norms=has_norms,
        block_tokens=block_tokens,
        cut=cut,
    )


def test_a_context_of_a_hundred_thousand_tokens() -> None:
    cut = launch.AttentionCut(heads=1, num_splits=2, depth=64 if DEVICE.type == "cpu" else 4, num_warps=8)
    check([100_000, 17], heads=1, kv_heads=1, dim=16, dtype=torch.bfloat16, has_norms=False, cut=cut)


def test_what_it_is_not_for() -> None:
    def can(*, rows: int = 1, group: int = 2, dim: int = 128, held: torch.dtype = torch.bfloat16) -> bool:
        qkv = torch.empty(rows, (group + 2) * dim, dtype=torch.bfloat16, device="meta")
        return launch.can_attend(qkv, torch.empty(4, 16, 1, dim, dtype=held, device="meta"))

    assert can()
    assert can(rows=2, group=4)
    assert not can(rows=3)
    assert not can(group=5)
    assert not can(dim=256)
    assert not can(held=torch.int8)
    wide = torch.empty(1, 4 * 128, device="meta")
    assert not launch.can_attend(wide, torch.empty(4, 16, 1, 128, device="meta"))
