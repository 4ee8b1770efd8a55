from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.backend import CpuBackend, KvCache
from engine.buffers import InputBuffers
from engine.config import ResolvedConfig
from engine.request import Request, RequestId, SamplingParams
from engine.step import StepPlan, StepRow
from kernels.paged_attention.reference import paged_attention

CPU = torch.device("cpu")
LAYERS, HEADS, DIM, NUM_BLOCKS = 2, 4, 8, 200
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Sums of up to 100 products of numbers near 1, relative to a result near 1; bfloat16 keeps 8 bits."""


def config_of(block_tokens: int, max_len: int = 128) -> ResolvedConfig:
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
        max_blocks_per_request=-(-max_len // block_tokens),
        enable_prefix_cache=True,
        max_queued_requests=1,
        max_adapter_rank=1,
        max_device_adapters=1,
        max_host_adapters=1,
    )


def make_cache(block_tokens: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(
        num_layers=LAYERS,
        num_blocks=NUM_BLOCKS,
        block_tokens=block_tokens,
        kv_heads=kv_heads,
        head_dim=DIM,
        dtype=dtype,
        device=CPU,
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
                block_ids=tables[i],
                samples=True,
            )
            for i in order
        ),
    )


def check_against_reference(
    ranges: list[tuple[int, int]], *, block_tokens: int, kv_heads: int, dtype: torch.dtype, extra_blocks: int, seed: int
) -> None:
    """Attend rows whose earlier positions are cached, everything unwritten being NaN, and compare in float64."""
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(block_tokens, kv_heads, dtype)
    poison(cache)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    # A row may own blocks that it has not reached yet.
    tables = [[free.pop() for _ in range(-(-end // block_tokens) + extra_blocks)] for _, end in ranges]
    plan = plan_of(ranges, tables)
    buffers = InputBuffers(config_of(block_tokens), cache.null_block)
    _, _, batch = buffers.fill(plan)
    cache.clear(buffers.fresh_blocks(plan))
    keys, values = cache.layer(1)
    for row in plan.rows:
        if row.start % block_tokens:  # the step that began this block has cleared it
            block = row.block_ids[row.start // block_tokens]
            keys[block], values[block] = 0, 0
        for position in range(row.start):
            block, slot = row.block_ids[position // block_tokens], position % block_tokens
            keys[block, slot] = torch.randn(kv_heads, DIM, generator=generator).to(dtype)
            values[block, slot] = torch.randn(kv_heads, DIM, generator=generator).to(dtype)
    q, k, v = (
        torch.randn(plan.num_tokens, heads, DIM, generator=generator).to(dtype) for heads in (HEADS, kv_heads, kv_heads)
    )
    backend = CpuBackend()
    backend.write_kv(k, v, (keys, values), batch.slots)
    found = backend.attend(q, (keys, values), batch)
    expected = paged_attention(
        q=q.double(),
        k_cache=keys.double(),
        v_cache=values.double(),
        block_tables=[row.block_ids for row in plan.rows],
        starts=[row.start for row in plan.rows],
        ends=[row.end for row in plan.rows],
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


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    cache = make_cache(block_tokens=4, kv_heads=2)
    poison(cache)
    k, v = torch.ones(3, 2, DIM), torch.full((3, 2, DIM), 2.0)
    CpuBackend().write_kv(k, v, cache.layer(0), torch.tensor([5, 0, 11]))
    keys, values = cache.layer(0)
    assert keys.flatten(0, 1)[[5, 0, 11]].eq(1).all()
    assert values.flatten(0, 1)[[5, 0, 11]].eq(2).all()
    assert int(cache.data[:, :, : cache.null_block].isfinite().sum()) == 2 * 3 * 2 * DIM


def test_clearing_takes_nan_from_a_block_in_all_layers() -> None:
    cache = make_cache(block_tokens=4, kv_heads=1)
    poison(cache)
    cache.clear([3, 7])
    assert cache.data[:, :, [3, 7]].eq(0).all()
    assert cache.data[:, :, 4].isnan().all()
    cache.clear([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_computes_in_float32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 16).to(dtype) * 100, torch.randn(16).to(dtype)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = CpuBackend().rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_rotation_turns_pairs_of_halves() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    angles = torch.tensor([0.3, 0.7])
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos)), torch.cat((sin, sin)))).unsqueeze(0)
    first, second = x[..., :2], x[..., 2:]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    torch.testing.assert_close(CpuBackend().rotate(x, table), expected)


def test_the_gate_is_the_first_half() -> None:
    found = CpuBackend().silu_and_multiply(torch.tensor([[1.0, -1.0, 2.0, 3.0]]))
    gate = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(found, (gate * torch.sigmoid(gate) * torch.tensor([2.0, 3.0])).unsqueeze(0))
