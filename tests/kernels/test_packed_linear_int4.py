from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.packed_linear_int4.reference import (
    E2M1,
    beside_panels,
    packed_linear_int4,
    packed_linear_mxfp4,
    to_int4_panels,
    to_levels,
)
from kernels.program import Pool
from kernels.streamed_linear.reference import round_to_levels
from tests.kernels.conftest import DTYPES, assert_near

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def multiply(pool: Pool, x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply natively; one row more than asked stays as it was."""
    levels, scales, zeros = weight
    rows, (out, depth) = len(x), levels.shape
    found = torch.full((rows + 1, out), 7.0, dtype=x.dtype)
    tensors = (x, to_int4_panels(levels), beside_panels(scales), beside_panels(zeros), bias, found)
    pool.call("packed_linear_int4", x.dtype, rows, tensors, (depth, out, depth // scales.shape[1]))
    assert found[rows].eq(7).all()
    return found[:rows]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 129])),
    out=st.integers(1, 100),
    group=st.sampled_from([32, 64, 128, 256]),
    num_groups=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_reference(
    pool: Pool, rows: int, out: int, group: int, num_groups: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    depth = group * num_groups
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, depth), (out,)))
    levels = torch.randint(16, (out, depth), generator=generator, dtype=torch.uint8)
    scales = torch.randn(out, num_groups, generator=generator)
    zeros = torch.randint(17, (out, num_groups), generator=generator, dtype=torch.uint8)
    found = multiply(pool, x, (levels, scales, zeros), bias if has_bias else None)
    assert_near(found, packed_linear_int4(x, levels, scales, zeros, bias if has_bias else None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_product_is_the_same_among_few_and_among_many(pool: Pool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(140, 96, generator=generator).to(dtype)
    levels = torch.randint(16, (100, 96), generator=generator, dtype=torch.uint8)
    scales = torch.randn(100, 3, generator=generator)
    zeros = torch.randint(17, (100, 3), generator=generator, dtype=torch.uint8)
    together = multiply(pool, x, (levels, scales, zeros))
    for count in (1, 2, 5, 12, 13, 40):
        assert torch.equal(
            together[64 : 64 + count], multiply(pool, x[64 : 64 + count].clone(), (levels, scales, zeros))
        )


@settings(deadline=None, max_examples=40)
@given(
    rows=st.sampled_from([1, 5, 20]),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-140, 110),
    spread=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_inputs_of_any_size_are_multiplied_with_no_more_error_than_a_part_of_their_group_s_largest(
    pool: Pool, rows: int, dtype: torch.dtype, exponent: int, spread: int, seed: int
) -> None:
    """Processors without products of bfloat16 may round them to 16 bits, and what is nearly subnormal to zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(exponent - spread * torch.rand(rows, 256, generator=generator, dtype=torch.float64))
    x = (torch.randn(rows, 256, generator=generator, dtype=torch.float64) * sizes).to(dtype)
    levels = torch.randint(16, (20, 256), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(20, 2, generator=generator), torch.full((20, 2), 8, dtype=torch.uint8)
    found = multiply(pool, x, (levels, scales, zeros))
    expected = packed_linear_int4(x.double(), levels, scales, zeros, None)
    largest = x.double().abs().view(rows, 2, 128).amax(dim=2).sum(dim=1, keepdim=True)
    room = largest * 8 * 128 * 2**-16 + expected.abs() * 2**-8 + 2.0**-110
    assert ((found.double() - expected).abs() <= room).all()


@pytest.mark.parametrize("rows", [1, 5, 12, 40])
def test_inputs_of_like_sizes_are_multiplied_exactly(pool: Pool, rows: int) -> None:
    """Where all sums are integers that float32 can tell apart."""
    x, levels = torch.randint(-64, 65, (rows, 64)).bfloat16(), torch.randint(16, (40, 64), dtype=torch.uint8)
    zeros = torch.randint(17, (40, 2), dtype=torch.uint8)
    found = multiply(pool, x, (levels, torch.ones(40, 2), zeros))
    assert torch.equal(found, packed_linear_int4(x, levels, torch.ones(40, 2), zeros, None))


@settings(deadline=None, max_examples=40)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 129])),
    out=st.integers(1, 100),
    num_groups=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_with_numbers_of_e2m1_is_that_of_the_reference(
    pool: Pool, rows: int, out: int, num_groups: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    depth = 32 * num_groups
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, depth), (out,)))
    levels = torch.randint(16, (out, depth), generator=generator, dtype=torch.uint8)
    scales = torch.randint(-6, 6, (out, num_groups), generator=generator).float().exp2()
    found = torch.full((rows + 1, out), 7.0, dtype=dtype)
    tensors = (x, to_int4_panels(levels), beside_panels(scales), bias if has_bias else None, found)
    pool.call("packed_linear_mxfp4", dtype, rows, tensors, (depth, out, 32))
    assert found[rows].eq(7).all()
    assert_near(found[:rows], packed_linear_mxfp4(x, levels, scales, bias if has_bias else None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_level_of_e2m1_is_its_number_exactly(pool: Pool, dtype: torch.dtype) -> None:
    levels = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)
    found = torch.empty(32, 1, dtype=dtype)
    tensors = (torch.eye(32, dtype=dtype), to_int4_panels(levels), beside_panels(torch.ones(1, 1)), None, found)
    pool.call("packed_linear_mxfp4", dtype, 32, tensors, (32, 1, 32))
    assert found.flatten().tolist() == [*E2M1, *E2M1]


@pytest.mark.parametrize(("depth", "group"), [(256, 128), (192, 64), (96, 32)])
def test_rounding_is_to_the_nearest_of_sixteen_levels_and_keeps_zero(depth: int, group: int) -> None:
    weight = torch.randn(10, depth)
    weight[3, :group], weight[4, 5] = 0.0, 0.0
    levels, scales, zeros = to_levels(weight)
    assert scales.shape == zeros.shape == (10, depth // group)
    steps = levels.view(10, -1, group).float() - zeros.float().unsqueeze(-1)
    rounded = (steps * scales.unsqueeze(-1)).view(10, depth)
    assert ((rounded - weight).abs() <= 0.501 * scales.repeat_interleave(group, dim=1) + 1e-6).float().mean() > 0.99
    assert rounded[4, 5] == 0
    assert rounded[3, :group].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spoils_its_own_row_only(pool: Pool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 128).to(dtype), to_levels(torch.randn(40, 128))
    x[1, 5], x[2, 127] = torch.nan, torch.inf
    found = multiply(pool, x, weight)
    assert not found[1:3].isfinite().any()
    assert found[0].isfinite().all()
    assert found[3:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "depth", "group"), [(1, 32, 32), (16, 128, 64), (40, 256, 128), (33, 96, 32)])
def test_the_kernel_rounds_and_lays_out_as_the_reference(
    pool: Pool, dtype: torch.dtype, out: int, depth: int, group: int
) -> None:
    """Bit by bit: on a GPU, and where a checkpoint's levels are kept, the reference does it."""
    weight = (torch.randn(out, depth) * torch.rand(out, 1) * 3).to(dtype)
    weight[0, :group] = 0.0
    weight[-1, :group] = weight[-1, :group].abs()
    levels, scales, zeros = round_to_levels(weight, group, torch.float32)
    expected = to_int4_panels(levels), beside_panels(scales), beside_panels(zeros)
    found = [torch.full_like(part, 7) for part in expected]
    pool.call_here("lay_out_int4", dtype, out, (weight, *found), (depth, group))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_stays_so_where_the_kernel_rounds(pool: Pool, bad: float) -> None:
    weight = torch.randn(16, 64)
    weight[3, 40] = bad
    panels, scales = torch.empty(1, 8, 16, dtype=torch.int32), torch.empty(1, 2, 16)
    zeros = torch.empty(1, 2, 16, dtype=torch.uint8)
    pool.call_here("lay_out_int4", torch.float32, 16, (weight, panels, scales, zeros), (64, 32))
    assert not scales[0, 1, 3].isfinite()
    assert scales.isfinite().sum() == 31
