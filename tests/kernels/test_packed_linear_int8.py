from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.packed_linear_int8.reference import packed_linear_int8, padded_depth, quantize_rows, to_int8_panels
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near


def multiply(pool: Pool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize both, multiply natively; one row more than asked stays as it was."""
    (rows, depth), out, dtype = x.shape, len(weight), x.dtype
    padded = padded_depth(depth)
    int8, column_scales = quantize_rows(weight)
    q, scales = torch.full((rows, padded), 99, dtype=torch.int8), torch.empty(rows)
    pool.call("quantize_rows", dtype, rows, (x, q, scales), (depth, padded))
    found = torch.full((rows + 1, out), 7.0, dtype=dtype)
    tensors = (q, scales, to_int8_panels(int8), column_scales, bias, found)
    pool.call("packed_linear_int8", dtype, rows, tensors, (padded, out))
    assert found[rows].eq(7).all()
    return found[:rows]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 257])),
    out=st.integers(1, 100),
    depth=st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 200])),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_reference(
    pool: Pool, rows: int, out: int, depth: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((rows, depth), (out, depth), out))
    found = multiply(pool, x, weight, bias if has_bias else None)
    assert_near(found, packed_linear_int8(x, *quantize_rows(weight), bias if has_bias else None))


def test_it_is_near_the_product_of_the_numbers_themselves(pool: Pool) -> None:
    x, weight = torch.randn(9, 512), torch.randn(64, 512)
    expected = x @ weight.T
    assert float((multiply(pool, x, weight) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_brought_to_their_own_scale(pool: Pool, dtype: torch.dtype) -> None:
    x = torch.randn(5, 70).to(dtype) * torch.tensor([1e-6, 1.0, 1e6, 0.0, 3.0])[:, None].to(dtype)
    q, scales = torch.empty(5, 128, dtype=torch.int8), torch.empty(5)
    pool.call("quantize_rows", dtype, 5, (x, q, scales), (70, 128))
    expected, expected_scales = quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales)
    assert int((q[:, :70].int() - expected.int()).abs().max()) <= 1
    assert q[:, 70:].eq(0).all()
    assert q[3].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 20])
def test_what_is_not_finite_spoils_its_own_row_only(pool: Pool, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 70).to(dtype), torch.randn(40, 70).to(dtype)
    x[1, 5], x[2, 69] = torch.nan, torch.inf
    found = multiply(pool, x, weight)
    assert not found[1:3].isfinite().any()
    assert found[0].isfinite().all()
    assert found[3:].isfinite().all()
