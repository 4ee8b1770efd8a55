from __future__ import annotations

import pytest
import torch

from kernels.add_rms_norm.reference import add_rms_norm
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_norms_in_float32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 16).to(dtype) * 100, torch.randn(16).to(dtype)
    wide = x.double()
    assert_near(
        add_rms_norm(x, None, weight, 1e-5),
        weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 8), (9, 100), (70, 48)])
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, has_delta: bool, rows: int, width: int) -> None:
    x, delta, weight = (torch.randn(shape).to(dtype) for shape in ((rows, width), (rows, width), width))
    expected_x = x.clone()
    expected = add_rms_norm(expected_x, delta if has_delta else None, weight, 1e-6)
    found = torch.empty_like(x)
    pool.call("add_rms_norm", dtype, rows, (x, delta if has_delta else None, weight, found), (width, 0, width), (1e-6,))
    assert torch.equal(x, expected_x)
    assert_near(found, expected)


@pytest.mark.parametrize(("rows", "width"), [(3, 8), (9, 100), (2, 64)])
def test_a_weight_in_float32_is_met_before_anything_is_rounded(pool: Pool, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(width) + 1
    wide = x.double()
    exact = weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = torch.empty_like(x)
    pool.call("add_rms_norm", x.dtype, rows, (x, None, weight, found), (width, 1, width), (1e-6,))
    # Rounded twice, a third of them would be another number.
    for once in (found, add_rms_norm(x, None, weight, 1e-6)):
        assert (once == exact.bfloat16()).float().mean() > 0.95


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_weight_there_is_the_sum_alone(pool: Pool, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(5, 21).to(dtype) for _ in range(2))
    expected = x + delta
    pool.call("add_rms_norm", dtype, 5, (x, delta, None, x), (21, 0, 21), (1e-6,))
    assert torch.equal(x, expected)
    assert add_rms_norm(x, None, None, 1e-6) is x


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_normed_in_place_and_their_neighbours_stay(pool: Pool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 90).to(dtype), torch.randn(40)
    expected = x.clone()
    expected[:, 30:70] = add_rms_norm(x[:, 30:70], None, weight, 1e-6)
    part = x[:, 30:]
    pool.call("add_rms_norm", dtype, 5, (part, None, weight, part), (40, 1, 90), (1e-6,))
    assert_near(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(pool: Pool, dtype: torch.dtype) -> None:
    x = torch.randn(3, 32).to(dtype)
    x[1, 4] = torch.nan
    found = torch.empty_like(x)
    pool.call("add_rms_norm", dtype, 3, (x, None, torch.ones(32, dtype=dtype), found), (32, 0, 32), (1e-6,))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
