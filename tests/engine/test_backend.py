from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.backend import Backend
from engine.buffers import InputBuffers
from engine.cache.layout import CacheLayout
from engine.config import ResolvedConfig
from engine.cpu.native_backend import NativeBackend
from engine.decoder.decoder import DecoderBatch
from engine.decoder.layer_forms import LayerForm
from engine.decoder.model_spec import KvShape
from engine.decoder.rope import RopeSpec
from engine.kv_cache import KvCache
from engine.request import Request, RequestId, SamplingParams
from engine.step import StepPlan, StepRow
from kernels.paged_attention.reference import paged_attention
from kernels.program import Pool
from tests.kernels.conftest import pool as pool  # the fixture
from tests.kernels.conftest import resident_bytes

CPU = torch.device("cpu")
LAYERS, HEADS, DIM, NUM_BLOCKS = 2, 4, 8, 200
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Sums of up to 100 products of numbers near 1, relative to a result near 1; bfloat16 keeps 8 bits."""


def config_of(block_tokens: int, max_len: int = 1024) -> ResolvedConfig:
    return ResolvedConfig(
        model_path="",
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_model_len=max_len,
        max_num_seqs=16,
        max_batched_tokens=4096,
        block_tokens=block_tokens,
        num_blocks=NUM_BLOCKS,
        enable_prefix_cache=True,
        max_queued_requests=1,
        max_adapter_rank=1,
        max_device_adapters=1,
        max_host_adapter_bytes=1 << 20,
    )


def make_cache(block_tokens: int, kv_heads: int, dtype: torch.dtype = torch.float32, dim: int = DIM) -> KvCache:
    return KvCache(
        layout=CacheLayout.single(LAYERS),
        num_blocks=NUM_BLOCKS,
        block_tokens=block_tokens,
        kv_shapes=[KvShape(kv_heads, dim)] * LAYERS,
        dtype=dtype,
        device=CPU,
        by_block=True,
    )


def poison(cache: KvCache) -> None:
    """Fill all that was never written with NaN; the null block belongs to the cache and stays zero."""
    cache.data[:, :, : cache.null_block] = torch.nan


def plan_of(ranges: list[tuple[int, int]], tables: list[list[int]]) -> StepPlan:
    params = SamplingParams(max_tokens=1)
    order = sorted(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0] > 1)
    return StepPlan(
        step_id=1,
        rows=tuple(
            StepRow(
                row=i,
                is_admission=True,
                request=Request(request_id=RequestId(str(i)), prompt_ids=(1,) * ranges[i][1], params=params),
                output_ids=[],
                start=ranges[i][0],
                end=ranges[i][1],
                block_tables=[tables[i]],
                samples=True,
            )
            for i in order
        ),
    )


class Attending:
    """Writes and attends with one backend over one cache, in panels or not."""

    def __init__(
        self,
        config: ResolvedConfig,
        cache: KvCache,
        dtype: torch.dtype,
        kv_heads: int,
        pool: Pool | None,
        form: LayerForm,
        sinks: torch.Tensor | None,
    ) -> None:
        self._cache = cache
        self._form = form
        self._sinks = sinks
        dim = cache.layer(0).k.shape[-1]
        self._buffers = InputBuffers(config, cache.null_block)
        whole = self._buffers.whole()
        self._qkv = torch.zeros(len(whole.token_ids), (HEADS + 2 * kv_heads) * dim, dtype=dtype)
        # No rotation: keys are written as they are.
        self._cos_sin = torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(len(self._qkv), 2, dim).to(dtype).contiguous()
        self._native = None if pool is None else NativeBackend(pool, dtype, 2)
        if self._native is not None:
            self._native.begin(whole)
            self._native.know(self._qkv)
            self._out = self._run(self._native, self._qkv, whole)

    def step(self, plan: StepPlan, qkv: torch.Tensor) -> torch.Tensor:
        """Run a plan whose tokens have these products; returns [tokens, heads, dim]."""
        batch = self._buffers.fill(plan)
        self._cache.clear(self._buffers.fresh_blocks(plan))
        if self._native is None:
            return self._run(Backend(), qkv, batch)
        self._qkv[: len(qkv)] = qkv
        self._native.counts[:2] = torch.tensor([len(qkv), len(plan.rows)])
        self._native.program.run()
        return self._out[: len(qkv)].clone()

    def _run(self, backend: Backend, qkv: torch.Tensor, batch: DecoderBatch) -> torch.Tensor:
        cache = self._cache.layer(1)
        cos_sin, attention = self._cos_sin[: len(qkv)], batch.attention[0]
        return backend.attend(qkv, cos_sin, None, 0.0, cache, attention, self._form, self._sinks)


def check_against_reference(
    ranges: list[tuple[int, int]],
    *,
    block_tokens: int,
    kv_heads: int,
    dtype: torch.dtype,
    extra_blocks: int,
    seed: int,
    dim: int = DIM,
    pool: Pool | None = None,
    sinks: torch.Tensor | None = None,
    **options: float,
) -> None:
    """Attend rows whose earlier positions are cached, everything unwritten being NaN, and compare in float64."""
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(block_tokens, kv_heads, dtype, dim)
    poison(cache)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    # A row may own blocks that it has not reached yet.
    tables = [[free.pop() for _ in range(-(-end // block_tokens) + extra_blocks)] for _, end in ranges]
    form = LayerForm(rope=RopeSpec(theta=1.0), **{"scale": dim**-0.5, **options})
    attending = Attending(config_of(block_tokens), cache, dtype, kv_heads, pool, form, sinks)
    plain = torch.zeros(2, NUM_BLOCKS, block_tokens, kv_heads, dim, dtype=torch.float64)

    def step(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.randn(plan.num_tokens, HEADS + 2 * kv_heads, dim, generator=generator).to(dtype)
        q, k, v = qkv.split((HEADS, kv_heads, kv_heads), dim=1)
        at = 0
        for row in plan.rows:
            for position in range(row.start, row.end):
                block, slot = row.block_tables[0][position // block_tokens], position % block_tokens
                plain[0, block, slot], plain[1, block, slot] = k[at], v[at]
                at += 1
        return q, attending.step(plan, qkv.flatten(1))

    earlier = [(0, start) for start, _ in ranges if start]
    if earlier:
        step(plan_of(earlier, [table for table, (start, _) in zip(tables, ranges, strict=True) if start]))
    plan = plan_of(ranges, tables)
    q, found = step(plan)
    expected = paged_attention(
        q=q.double(),
        k_cache=plain[0],
        v_cache=plain[1],
        block_tables=[row.block_tables[0] for row in plan.rows],
        starts=[row.start for row in plan.rows],
        ends=[row.end for row in plan.rows],
        sinks=sinks,
        **options,
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert cache.data[:, :, cache.null_block].eq(0).all()


ROW = st.integers(0, 60).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, start + 30)))
SINGLE_ROW = st.integers(0, 90).map(lambda start: (start, start + 1))


@settings(max_examples=30, deadline=None)
@given(
    ranges=st.lists(st.one_of(SINGLE_ROW, ROW), min_size=1, max_size=8),
    block_tokens=st.sampled_from([4, 5, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    extra_blocks=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_attention_is_that_of_the_reference_whatever_lies_in_unused_slots(
    ranges: list[tuple[int, int]], block_tokens: int, kv_heads: int, extra_blocks: int, seed: int
) -> None:
    check_against_reference(
        ranges, block_tokens=block_tokens, kv_heads=kv_heads, dtype=torch.float32, extra_blocks=extra_blocks, seed=seed
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 1)],
        [(15, 16)],
        [(16, 17)],
        [(0, 16)],
        [(0, 17)],
        [(16, 33)],
        [(7, 14)],
        [(99, 100), (0, 1), (15, 16), (3, 4)],
        [(99, 100), (0, 90), (31, 45)],
    ],
)
def test_attention_is_that_of_the_reference_at_the_borders_of_blocks(
    ranges: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    check_against_reference(ranges, block_tokens=16, kv_heads=2, dtype=dtype, extra_blocks=1, seed=1)


@settings(max_examples=30, deadline=None)
@given(
    ranges=st.lists(st.one_of(SINGLE_ROW, ROW), min_size=1, max_size=8),
    block_tokens=st.sampled_from([16, 32]),
    kv_heads=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_attention_over_panels_is_that_of_the_reference(
    pool: Pool,
    ranges: list[tuple[int, int]],
    block_tokens: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    check_against_reference(
        ranges,
        block_tokens=block_tokens,
        kv_heads=kv_heads,
        dtype=dtype,
        extra_blocks=seed % 3,
        seed=seed,
        dim=dim,
        pool=pool,
    )


def test_attention_over_panels_reads_a_long_context(pool: Pool) -> None:
    ranges = [(1000, 1001), (700, 900), (0, 1)]
    check_against_reference(
        ranges, block_tokens=16, kv_heads=2, dtype=torch.float32, extra_blocks=0, seed=3, dim=32, pool=pool
    )


FORMS: list[dict[str, float]] = [
    {},
    {"window": 1},
    {"window": 20},
    {"window": 130},
    {"scale": 1.0},
    {"softcap": 1.5, "window": 40},
    {"softcap": 0.5},
]


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("ranges", [[(0, 1), (63, 64), (40, 41)], [(0, 70)], [(299, 300), (150, 190), (5, 14)]])
def test_windows_and_scales_are_those_of_the_reference(
    pool: Pool, ranges: list[tuple[int, int]], has_kernels: bool, has_sinks: bool, options: dict[str, float]
) -> None:
    check_against_reference(
        ranges,
        block_tokens=16,
        kv_heads=2,
        dtype=torch.float32,
        extra_blocks=1,
        seed=4,
        dim=16,
        pool=pool if has_kernels else None,
        sinks=torch.tensor([-40.0, -1.0, 0.5, 3.0]) if has_sinks else None,
        **options,
    )


@pytest.mark.parametrize("are_samples", [False, True])
def test_results_of_samples_take_memory_as_they_come_and_those_of_tokens_at_once(pool: Pool, are_samples: bool) -> None:
    config = config_of(block_tokens=16)
    whole = InputBuffers(config, NUM_BLOCKS).whole()
    backend = NativeBackend(pool, torch.float32, 2)
    backend.begin(whole)
    wide = torch.zeros(1, (64 << 20) // 4 // (config.max_num_seqs if are_samples else config.max_batched_tokens))
    before = resident_bytes()
    out = backend.take(wide, whole.sampled if are_samples else whole.token_ids)
    assert out.nbytes == 64 << 20
    assert (resident_bytes() - before > 32 << 20) is not are_samples
