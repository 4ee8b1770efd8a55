"""Attention against its reference: random rows, every head size, windows, soft caps, splits, what must not be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels import architecture
from kernels.paged_attention import launch
from kernels.paged_attention.reference import paged_attention
from tests.kernels.gpu.conftest import DEVICE, DTYPES, SHORT, assert_near, randn

HEADS = [(4, 2, 64), (7, 1, 80), (2, 2, 96), (8, 2, 128), (2, 1, 256), (4, 1, 512)]
"""Query heads, kv heads and their dimension."""


@dataclass(frozen=True)
class Case:
    """Rows over a cache in which only their own slots hold numbers; everything else is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[list[int]]
    spans: list[tuple[int, int]]

    def expected(self, **options: Any) -> torch.Tensor:
        """By the reference, on the host: it takes positions one by one."""
        expected = paged_attention(
            q=self.q.double().cpu(),
            k_cache=self.k_cache.double().cpu(),
            v_cache=self.v_cache.double().cpu(),
            block_tables=self.tables,
            starts=[start for start, _ in self.spans],
            ends=[end for _, end in self.spans],
            **{name: given.cpu() if isinstance(given, torch.Tensor) else given for name, given in options.items()},
        )
        return expected.to(DEVICE)

    def found(self, *, num_fillers: int = 0, **options: Any) -> torch.Tensor:
        """By the kernel, with rows of no tokens behind those of one token."""
        rows, at = [], 0
        table = torch.zeros(len(self.spans) + 1, max(map(len, self.tables)) + 1, dtype=torch.int64)
        for index, ((start, end), blocks) in enumerate(zip(self.spans, self.tables, strict=True)):
            table[index + 1, : len(blocks)] = torch.tensor(blocks)
            rows.append([at, start, end - start, index + 1])
            at += end - start
        num_decodes = sum(end - start == 1 for start, end in self.spans)
        q = self.q
        if num_fillers:
            assert num_decodes == len(self.spans)
            rows += [[at + filler, 0, 0, 0] for filler in range(num_fillers)]
            q = torch.cat((q, torch.zeros_like(q[:1]).expand(num_fillers, -1, -1)))
            num_decodes += num_fillers
        arrived = launch.counters(DEVICE)
        out = launch.paged_attention(
            q=q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            rows=torch.tensor(rows, device=DEVICE),
            num_decodes=num_decodes,
            tables=table.to(DEVICE),
            arrived=arrived,
            **options,
        )
        assert not arrived.any()
        return out[:at]


def make(
    spans: list[tuple[int, int]], *, heads: int, kv_heads: int, dim: int, block_tokens: int, dtype: torch.dtype
) -> Case:
    spans = sorted(spans, key=lambda span: span[1] - span[0] > 1)
    counts = [-(-end // block_tokens) for _, end in spans]
    order = torch.randperm(sum(counts) + 2).tolist()
    k = torch.full((len(order), block_tokens, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    v = k.clone()
    tables = []
    for (_, end), count in zip(spans, counts, strict=True):
        tables.append([order.pop() for _ in range(count)])
        slots = torch.tensor([tables[-1][p // block_tokens] * block_tokens + p % block_tokens for p in range(end)])
        for cache in (k, v):
            cache.flatten(0, 1)[slots.to(DEVICE)] = randn(end, kv_heads, dim, dtype=dtype)
    q = randn(sum(end - start for start, end in spans), heads, dim, dtype=dtype)
    return Case(q=q, k_cache=k, v_cache=v, tables=tables, spans=spans)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_every_head_size(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    spans = [(0, 1), (37, 38), (0, 20), (15, 18)]
    case = make(spans, heads=heads, kv_heads=kv_heads, dim=dim, block_tokens=16, dtype=dtype)
    assert_near(case.found(), case.expected())


@settings(deadline=None, max_examples=15)
@given(
    spans=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=4),
    group=st.integers(1, 5),
    block_tokens=st.sampled_from([1, 3, 16]),
    programs=st.sampled_from([1, 2, 5, 30]),
)
def test_any_rows(spans: list[tuple[int, int]], group: int, block_tokens: int, programs: int) -> None:
    ranges = [(start, start + count) for start, count in spans]
    case = make(ranges, heads=2 * group, kv_heads=2, dim=16, block_tokens=block_tokens, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "num_multiprocessors", lambda: programs)
        assert_near(case.found(), case.expected())


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_a_context_much_longer_than_the_others_is_cut(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Beside it rows of one tile and of one more; shares that end in a row, with one, and that nothing is left for."""
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: programs)
    spans = [(500, 501), (31, 32), (32, 33), (3, 4), (64, 65), (200, 201)]
    case = make(spans, heads=4, kv_heads=2, dim=16, block_tokens=16, dtype=torch.float32)
    assert_near(case.found(num_fillers=1), case.expected())


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("window", "softcap"), [(17, 0.0), (0, 3.0)])
def test_windows_and_soft_caps_of_every_head_size(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int, softcap: float
) -> None:
    spans = [(0, 1), (70, 71), (40, 60)]
    case = make(spans, heads=heads, kv_heads=kv_heads, dim=dim, block_tokens=16, dtype=dtype)
    assert_near(case.found(window=window, softcap=softcap), case.expected(window=window, softcap=softcap))


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (20, 0.0), (0, 3.0), (33, 2.0)])
def test_windows_and_soft_caps(monkeypatch: pytest.MonkeyPatch, programs: int, window: int, softcap: float) -> None:
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: programs)
    spans = [(0, 1), (70, 71), (40, 75), (0, 5)]
    case = make(spans, heads=4, kv_heads=2, dim=16, block_tokens=16, dtype=torch.float32)
    assert_near(case.found(window=window, softcap=softcap), case.expected(window=window, softcap=softcap))


@pytest.mark.parametrize("programs", [1, 3, 20])
@pytest.mark.parametrize(
    ("options", "height"), [({}, -30.0), ({}, 0.0), ({}, 6.0), ({"window": 20}, 0.0), ({"softcap": 3.0}, 0.0)]
)
def test_a_sink_counts_once_however_the_keys_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, programs: int, options: dict[str, Any], height: float
) -> None:
    """Far below all scores, among them, and above: then little of the values is left."""
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: programs)
    spans = [(0, 1), (200, 201), (40, 75), (0, 5)]
    case = make(spans, heads=6, kv_heads=2, dim=16, block_tokens=16, dtype=torch.float32)
    sinks = randn(6, dtype=torch.float32) + height
    found = case.found(sinks=sinks, **options)
    torch.testing.assert_close(found.double(), case.expected(sinks=sinks, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("programs", [1, 4])
def test_rows_of_no_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: programs)
    case = make([(5, 6), (16, 17)], heads=2, kv_heads=1, dim=16, block_tokens=16, dtype=torch.float32)
    assert_near(case.found(num_fillers=3), case.expected())


def test_a_context_of_a_hundred_thousand_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of one token, and a chunk that goes on from as many; by larger tiles where programs are interpreted."""
    if not torch.cuda.is_available():
        share = launch.Share(least_m=16, block_n=4096, per_multiprocessor=2, num_warps=4, num_stages=1)
        monkeypatch.setattr(launch, "decode_share", lambda *_, **__: share)
        tile = launch.Tile(block_m=16, block_n=4096, num_warps=4, num_stages=1)
        monkeypatch.setattr(launch, "prefill_tile", lambda *_, **__: tile)
    spans = [(99_999, 100_000), (99_999, 100_001)]
    case = make(spans, heads=2, kv_heads=1, dim=16, block_tokens=16, dtype=torch.float32)
    assert_near(case.found(), case.expected())
