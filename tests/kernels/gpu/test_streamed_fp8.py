"""Products of few rows by 8-bit floats, against the reference in float64: any sizes, any cut, one order of sums."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.architecture import PROGRAMS_WANTED, pretending, shared_bytes
from kernels.row_quantization.reference import dequantize_rows, quantize_rows
from kernels.streamed_linear import launch
from kernels.streamed_linear.reference import FP8, Fp8Matrix, streamed_linear, to_fp8
from tests.kernels.gpu.conftest import DEVICE, TOLERANCE, randn
from tests.kernels.gpu.test_streamed_linear import check_alone, check_few_rows, few_rows_of_any_size
from tests.oracles.plain_matrices import from_fp8

# Inputs and weights are 8-bit floats, so that the interpreter multiplies no bfloat16.
DTYPES = [torch.float32, torch.bfloat16]
SUM_TOLERANCE = 2.0**-10 if torch.cuda.is_available() else 2.0**-20
"""Of all products' sizes together: Hopper keeps 14 bits of the largest of 32 products, the interpreter float32."""


def counters() -> torch.Tensor:
    """For all products here."""
    return launch.counters(300, 140, DEVICE)


def drawn(width: int, depth: int) -> Fp8Matrix:
    """A matrix whose outputs are of very different sizes."""
    return to_fp8(randn(width, depth, dtype=torch.float32) * torch.logspace(-1, 1, width, device=DEVICE).unsqueeze(1))


def check(matrix: Fp8Matrix, x: torch.Tensor, bias: torch.Tensor | None, cut: launch.LinearCut | None = None) -> None:
    """Each result by what its own products amount to: a large row would hide what is wrong of a small one."""
    arrived = counters()
    found = launch.streamed_linear(x, matrix, bias, arrived, cut)
    assert found.dtype == x.dtype
    assert not arrived.any()
    rounded, weight = dequantize_rows(*quantize_rows(x, FP8)), from_fp8(matrix)
    expected = rounded @ weight.T + (0 if bias is None else bias.double())
    sizes = rounded.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    assert ((found - expected).abs() <= SUM_TOLERANCE * sizes + TOLERANCE[x.dtype] * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "depth"), [(1, 64, 128), (3, 130, 208), (17, 64, 1008), (70, 48, 144), (130, 16, 16)]
)
def test_either_way_that_they_are_cut(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    x = (randn(rows, depth, dtype=torch.float32) * torch.logspace(-1, 1, rows, device=DEVICE).unsqueeze(1)).to(dtype)
    for is_wide in (False, True) if rows <= launch.MAX_WIDE_ROWS else (False,):
        cut = launch.tile_cut(rows, width, depth, 1, is_wide=is_wide)
        check(drawn(width, depth), x, randn(width, dtype=dtype) if is_wide else None, cut)


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 140),
    width=st.integers(1, 300),
    depth=st.integers(1, 1100),
    block_n=st.sampled_from([64, 128, 256]),
    block_k=st.sampled_from([128, 256]),
    splits=st.sampled_from([1, 2, 3, 8]),
    has_bias=st.booleans(),
)
def test_any_sizes_and_any_cut(
    rows: int, width: int, depth: int, block_n: int, block_k: int, splits: int, has_bias: bool
) -> None:
    """Also cuts that leave programs at the end without work."""
    cut = launch.LinearCut(block_n=block_n, block_k=block_k, num_splits=splits, num_warps=8, num_stages=2)
    bias = randn(width, dtype=torch.float32) if has_bias else None
    check(drawn(width, depth), randn(rows, depth, dtype=torch.float32), bias, cut)


def test_parts_of_a_depth_are_added_in_their_order() -> None:
    """By another order the 1 would be left, which the first part is too large for."""
    x = torch.full((1, 384), 448.0, device=DEVICE)
    x[:, 128:256] = 0
    x[:, 128] = 1
    held = torch.full((5, 384), 448.0, device=DEVICE)
    held[:, 128:256] = 1
    held[:, 256:] *= -1
    matrix = Fp8Matrix.of(held.to(FP8), torch.ones(5, device=DEVICE))
    cut = launch.LinearCut(block_n=64, block_k=128, num_splits=3, num_warps=4, num_stages=2)
    assert not launch.streamed_linear(x, matrix, None, counters(), cut).any()


def test_a_row_does_not_depend_on_its_company() -> None:
    check_alone(drawn(70, 300), counters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "depth"), [(1, 16, 64), (2, 34, 1400), (1, 2, 1024), (2, 26, 4112), (2, 10, 16400)]
)
def test_few_rows_are_multiplied_as_they_are(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    """Also gated, and with a matrix that no cut divides."""
    matrix = to_fp8(randn(width, depth, dtype=torch.float32))
    check_few_rows(randn(rows, depth, dtype=dtype) / depth**0.5, matrix, from_fp8(matrix))


@settings(deadline=None, max_examples=12)
@few_rows_of_any_size
def test_any_sizes_and_any_cut_of_few_rows(rows: int, width: int, depth: int, block_n: int, block_k: int) -> None:
    x, matrix = randn(rows, depth, dtype=torch.float32), drawn(width, depth)
    found = launch.row_linear(x, matrix, None, cut=launch.RowCut(block_n=block_n, block_k=block_k, num_warps=1))
    sizes = x.double().abs() @ from_fp8(matrix).abs().T
    assert ((found - x.double() @ from_fp8(matrix).T).abs() <= 1e-5 * sizes).all()


def test_what_is_not_finite_is_seen_where_it_is() -> None:
    x, weight = torch.ones(2, 128, device=DEVICE), torch.ones(16, 128, device=DEVICE)
    x[1, 7] = weight[3, 5] = torch.nan
    matrix = launch.to_fp8(weight)
    for found in (launch.streamed_linear(x, matrix, None, counters()), launch.row_linear(x, matrix, None)):
        torch.testing.assert_close(found[0, [0, 2, 4, 15]], torch.full((4,), 128.0, device=DEVICE))
        assert found[:, 3].isnan().all()
        assert found[1].isnan().all()


def test_weights_are_rounded_as_defined() -> None:
    weight = randn(20, 48, dtype=torch.bfloat16)
    found, expected = launch.to_fp8(weight), to_fp8(weight)
    assert torch.equal(found.held.float(), expected.held.float())
    torch.testing.assert_close(found.units, expected.units)
    off = (from_fp8(found) - weight.double()).abs()
    assert (off <= weight.double().abs() / 16 + weight.double().abs().amax(1, keepdim=True) / 1000).all()


def test_the_reference_multiplies_what_is_held() -> None:
    matrix, x, bias = drawn(7, 40), randn(3, 40, dtype=torch.float32), randn(7, dtype=torch.float32)
    expected = dequantize_rows(*quantize_rows(x, FP8)) @ from_fp8(matrix).T + bias
    torch.testing.assert_close(streamed_linear(x, matrix, bias).double(), expected, rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    matrix = drawn(5, 64)
    assert launch.streamed_linear(randn(0, 64, dtype=torch.float32), matrix, None, counters()).shape == (0, 5)
    assert launch.row_linear(randn(0, 64, dtype=torch.float32), matrix, None).shape == (0, 5)


@pytest.mark.parametrize("number_bytes", [1, 2])
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)])
def test_a_cut_fits_and_has_enough_on_its_way(target: str, width: int, depth: int, number_bytes: int) -> None:
    for rows in (1, 2, 16, 17, 32, 64, 65, 128) if number_bytes == 1 else (17, 32, 64):
        for is_wide in (False, True) if rows <= launch.MAX_WIDE_ROWS else (False,):
            with pretending(target):
                cut, room = launch.tile_cut(rows, width, depth, number_bytes, is_wide=is_wide), shared_bytes()
            programs = -(-width // cut.block_n) * cut.num_splits
            # Two for each multiprocessor at most, save where tiles alone are more.
            assert programs <= PROGRAMS_WANTED or cut.num_splits == 1
            block_m = max(16, 1 << (rows - 1).bit_length())
            side = 1 if programs <= PROGRAMS_WANTED // 2 or cut.block_n * block_m > 8192 else 2
            stage_bytes = (cut.block_n + block_m) * cut.block_k * number_bytes
            assert side * cut.num_stages * stage_bytes <= max(room, side * 2 * stage_bytes)
            if target == "sm_90":
                assert side * (cut.num_stages - 1) * cut.block_n * cut.block_k * number_bytes >= 64 * 1024
