from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.packed_linear.reference import as_panels, panel_numel, to_panels
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near
from tests.oracles.plain_matrices import from_panels


@settings(deadline=None)
@given(out=st.integers(1, 70), depth=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_panels_hold_the_matrix_and_zeros(out: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out, depth).to(dtype)
    panels = to_panels(weight)
    assert panels.numel() == panel_numel(weight.shape, dtype)
    assert torch.equal(from_panels(panels, out, depth), weight)
    assert int((panels != 0).sum()) == int((weight != 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_whole_panels_is_seen_in_them_without_a_copy(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 10).to(dtype)
    assert torch.equal(as_panels(weight), to_panels(weight))
    assert as_panels(weight).data_ptr() == weight.data_ptr()


@settings(deadline=None, max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 255, 256, 257, 300])),
    out=st.integers(1, 100),
    depth=st.one_of(st.integers(1, 20), st.sampled_from([32, 48, 64, 96, 160])).map(lambda steps: 2 * steps),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_matrix(
    pool: Pool, rows: int, out: int, depth: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, depth), (out, depth), out)
    )
    found = torch.full((rows + 1, out), 7.0, dtype=dtype)
    pool.call("packed_linear", dtype, rows, (x, to_panels(weight), bias if has_bias else None, found), (depth, out))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert_near(found[:rows], expected, at_least=depth**0.5)
    assert found[rows].eq(7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [94, 96])
def test_a_row_s_product_is_the_same_among_few_and_among_many(pool: Pool, depth: int, dtype: torch.dtype) -> None:
    """One row is multiplied by other instructions than several are on some processors."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, depth, generator=generator).to(dtype) for count in (20, 100))

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(rows), 100)
        pool.call("packed_logits", dtype, len(rows), (rows, to_panels(weight), None, found), (depth, 100))
        return found

    together = multiply(x)
    for count in (1, 2, 3, 5, 6, 12):
        assert torch.equal(together[4 : 4 + count], multiply(x[4 : 4 + count].clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_not_rounded(pool: Pool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(50, 64).to(dtype)
    found = torch.empty(5, 50)
    pool.call("packed_logits", dtype, 5, (x, to_panels(weight), None, found), (64, 50))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 20, 40])
def test_what_is_not_finite_stays_so_and_in_its_row(pool: Pool, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(40, 64).to(dtype)
    x[1, 5], x[2, 63] = torch.nan, torch.inf
    found = torch.empty(rows, 40, dtype=dtype)
    pool.call("packed_linear", dtype, rows, (x, to_panels(weight), None, found), (64, 40))
    assert not found[1:3].isfinite().any()
    assert found[0].isfinite().all()
    assert found[3:].isfinite().all()
