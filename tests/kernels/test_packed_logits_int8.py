from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.packed_linear_int4.reference import beside_panels
from kernels.packed_logits_int8.reference import embed_int8, packed_logits_int8, to_byte_panels, to_bytes
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near

GROUPS = (32, 64, 128)


def lay_out(pool: Pool, weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    (out, depth), num_panels = weight.shape, -(-len(weight) // 16)
    panels = torch.full((num_panels, depth // 4, 16), 7, dtype=torch.int32)
    scales = torch.full((num_panels, depth // group, 16), 7.0)
    pool.call("lay_out_logits_int8", weight.dtype, out, (weight, panels, scales), (depth, group))
    return panels, scales


@settings(deadline=None, max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 129])),
    out=st.integers(1, 100),
    group=st.sampled_from(GROUPS),
    num_groups=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_logits_and_embeddings_are_those_of_the_reference(
    pool: Pool, rows: int, out: int, group: int, num_groups: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    depth = group * num_groups
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    levels = torch.randint(-127, 128, (out, depth), generator=generator, dtype=torch.int8)
    scales = torch.rand(out, num_groups, generator=generator)
    panels = to_byte_panels(levels), beside_panels(scales)
    logits = torch.full((rows + 1, out), 7.0)
    pool.call("packed_logits_int8", dtype, rows, (x, *panels, None, logits), (depth, out, group))
    assert logits[rows].eq(7).all()
    # With AVX2 alone, bfloat16 inputs are rounded to 16 bits of the largest of their group (`kernels/level_pairs.h`).
    is_rounded = dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2"
    size = (400 if is_rounded else 36) * depth**0.5
    assert_near(logits[:rows], packed_logits_int8(x, levels, scales), at_least=size)
    ids = torch.randint(out, (rows,), generator=generator)
    embedded = torch.full((rows + 1, depth), 7.0, dtype=dtype)
    pool.call("embed_int8", dtype, rows, (*panels, ids, embedded), (depth, group))
    assert embedded[rows].eq(7).all()
    assert torch.equal(embedded[:rows], embed_int8(ids, levels, scales, dtype))


@settings(deadline=None, max_examples=40)
@given(
    out=st.integers(1, 40),
    group=st.sampled_from(GROUPS),
    num_groups=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1.0, 1e-30, 1e-38, 3e-44, 1e30]),
    seed=st.integers(0, 99),
)
def test_the_kernel_rounds_and_lays_out_as_the_reference(
    pool: Pool, out: int, group: int, num_groups: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    weight = torch.randn(out, group * num_groups, generator=torch.Generator().manual_seed(seed)).mul_(size).to(dtype)
    weight[0, :group] = 0.0
    levels, scales = to_bytes(weight, group)
    panels, beside = lay_out(pool, weight, group)
    assert torch.equal(panels, to_byte_panels(levels))
    assert torch.equal(beside, beside_panels(scales))


@pytest.mark.parametrize("group", GROUPS)
def test_rounding_is_to_the_nearest_and_keeps_zero_and_the_largest(group: int) -> None:
    weight = torch.randn(10, 2 * group)
    weight[3, :group] = 0.0
    levels, scales = to_bytes(weight, group)
    rounded = embed_int8(torch.arange(10), levels, scales, torch.float32)
    assert ((rounded - weight).abs() <= 0.501 * scales.repeat_interleave(group, dim=1)).all()
    assert rounded[3, :group].eq(0).all()
    tops = weight.view(10, 2, group).abs().amax(dim=2)
    assert torch.allclose(rounded.view(10, 2, group).abs().amax(dim=2), tops)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_stays_so(pool: Pool, bad: float) -> None:
    weight = torch.randn(16, 64)
    weight[3, 40] = bad
    panels, scales = lay_out(pool, weight, 32)
    assert scales[0, 1, 3].isnan()
    assert scales.isfinite().sum() == 31
    levels, expected = to_bytes(weight, 32)
    assert torch.equal(panels, to_byte_panels(levels))
    torch.testing.assert_close(scales, beside_panels(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spoils_its_own_row_only(pool: Pool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 128).to(dtype), torch.randn(40, 128)
    x[1, 5], x[2, 127] = torch.nan, torch.inf
    found = torch.empty(20, 40)
    tensors = (x, *lay_out(pool, weight, 128), None, found)
    pool.call("packed_logits_int8", dtype, 20, tensors, (128, 40, 128))
    assert not found[1:3].isfinite().any()
    assert found[0].isfinite().all()
    assert found[3:].isfinite().all()
