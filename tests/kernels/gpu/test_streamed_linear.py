"""Products of few rows, against the reference in float64: any sizes, any cut of the depth, one after the other."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.add_rms_norm.reference import add_rms_norm
from kernels.gated_activation.reference import activate_and_multiply
from kernels.streamed_linear import launch
from kernels.streamed_linear.layout import GROUP
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix, from_int4, pack_int4, to_int4
from tests.kernels.gpu.conftest import DEVICE, DTYPES, SHORT, TOLERANCE, assert_near, randn


def counters() -> torch.Tensor:
    """For all products here."""
    return launch.counters(140, 70, DEVICE)


def check(
    weight: torch.Tensor | Int4Matrix, rows: int, dtype: torch.dtype, *, has_bias: bool, is_wide: bool = False
) -> None:
    width, depth = weight.shape
    x = randn(rows, depth, dtype=dtype) / depth**0.5
    bias = randn(width, dtype=dtype) if has_bias else None
    arrived = counters()
    cut = launch.wide_cut(x, weight) if is_wide else None
    found = launch.streamed_linear(x, weight, bias, arrived, cut)
    assert found.dtype == dtype
    whole = from_int4(weight) if isinstance(weight, Int4Matrix) else weight
    assert_near(found, x.double() @ whole.double().T + (0 if bias is None else bias.double()))
    assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 64, 64), (3, 130, 200), (17, 64, 1000), (70, 48, 129)])
def test_weights_as_they_are(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    check(randn(width, depth, dtype=dtype), rows, dtype, has_bias=rows % 2 == 1)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("rows", "width", "depth"), [(17, 64, 1000), (40, 300, 256), (64, 130, 516)])
def test_either_way_that_a_full_batch_is_cut(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    x, weight = randn(rows, depth, dtype=dtype) / depth**0.5, randn(width, depth, dtype=dtype)
    arrived = launch.counters(width, rows, DEVICE)
    for is_wide in (False, True):
        cut = launch.tile_cut(rows, width, depth, 2, is_wide=is_wide)
        found = launch.streamed_linear(x, weight, None, arrived, cut)
        assert_near(found, x.double() @ weight.double().T)
        assert not arrived.any()


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 64, 1), (5, 130, 3), (33, 40, 8), (65, 16, 2)])
def test_weights_of_four_bits(dtype: torch.dtype, rows: int, width: int, groups: int) -> None:
    matrix = to_int4(randn(width, groups * GROUP, dtype=dtype) + 0.5)
    assert torch.equal(launch.from_int4(matrix), from_int4(matrix))
    for is_wide in (False, True):
        check(matrix, rows, dtype, has_bias=rows % 2 == 1, is_wide=is_wide)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("group", [32, 64, 256, 512])
def test_groups_of_other_sizes_that_checkpoints_have(dtype: torch.dtype, group: int) -> None:
    """The last is of all inputs. Every unit differs from its neighbours."""
    width, depth = 70, 512
    levels = torch.randint(0, 16, (width, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(depth // group, width, device=DEVICE).to(dtype) + 0.5
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.int32, device=DEVICE)
    matrix = pack_int4(levels, scales, zeros)
    assert matrix.group == group
    spread = [part.repeat_interleave(group, dim=0).T for part in (scales, zeros)]
    meant = (levels.double() - spread[1].double()) * spread[0].double()
    assert_near(from_int4(matrix), meant)
    assert torch.equal(launch.from_int4(matrix), from_int4(matrix))
    for is_wide in (False, True):
        check(matrix, 5, dtype, has_bias=False, is_wide=is_wide)


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 140),
    steps=st.integers(1, 6),
    splits=st.sampled_from([1, 2, 8]),
    is_int4=st.booleans(),
)
def test_any_sizes_and_any_cut(rows: int, width: int, steps: int, splits: int, is_int4: bool) -> None:
    """Also cuts that leave programs at the end without work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "num_splits", lambda *_: splits)
        if is_int4:
            check(to_int4(randn(width, steps * GROUP, dtype=torch.bfloat16)), rows, torch.bfloat16, has_bias=True)
        else:
            check(randn(width, steps * launch.BLOCK_K - 9, dtype=torch.float32), rows, torch.float32, has_bias=False)


def check_alone(weight: Matrix, arrived: torch.Tensor) -> None:
    """A row does not depend on its company."""
    x = randn(9, weight.shape[1], dtype=torch.float32)
    together = launch.streamed_linear(x, weight, None, arrived)
    order = torch.randperm(9, device=DEVICE)
    assert torch.equal(launch.streamed_linear(x[order], weight, None, arrived), together[order])


def check_few_rows(
    x: torch.Tensor, weight: torch.Tensor | Fp8Matrix, meant: torch.Tensor, cut: launch.RowCut | None = None
) -> None:
    """As float64 has it, with a bias and without, normed, added, gated; `meant` is what the weights stand for."""
    gain, eps = 1 + 0.1 * randn(x.shape[1], dtype=x.dtype), 1e-6
    normed = add_rms_norm(x.double(), None, gain.double(), eps)
    for bias in (None, randn(len(meant), dtype=x.dtype)):
        added = 0 if bias is None else bias.double()
        plain, after = (inputs @ meant.double().T + added for inputs in (x.double(), normed))
        assert_near(launch.row_linear(x, weight, bias, cut=cut), plain)
        # Sums of inputs that are not rounded, of which no number may be far.
        found = launch.row_linear(x, weight, bias, norm=(gain, eps), cut=cut)
        assert_near(found, after)
        before = randn(*plain.shape, dtype=x.dtype)
        out = before.clone()
        assert launch.row_linear(x, weight, bias, out=out, is_added=True, cut=cut) is out
        assert_near(out, before.double() + plain)
        wide = torch.empty(plain.shape, device=x.device)
        launch.row_linear(x, weight, bias, out=wide, cut=cut)
        assert_near(wide, plain)
        if len(meant) % 2 == 0:
            for norm in (None, (gain, eps)):
                halves = launch.row_linear(x, weight, bias, norm=norm, cut=cut).double()
                gated = launch.row_linear(x, weight, bias, norm=norm, is_gated=True, cut=cut)
                # Of two outputs the one that is left may be next to nothing, and as a short number mostly rounding.
                joined, near = activate_and_multiply(halves, "silu"), TOLERANCE[x.dtype]
                scale = max(1.0, float(joined.abs().max()))
                torch.testing.assert_close(gated.double(), joined, atol=near * scale, rtol=near)


def test_a_row_does_not_depend_on_its_company() -> None:
    check_alone(randn(70, 300, dtype=torch.float32), counters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 16, 64), (2, 34, 1400), (1, 2, 1024), (2, 26, 4104)])
def test_few_rows(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    """Also gated, and with a matrix that no cut divides."""
    weight = randn(width, depth, dtype=dtype)
    check_few_rows(randn(rows, depth, dtype=dtype) / depth**0.5, weight, weight)


few_rows_of_any_size = given(
    rows=st.integers(1, 4),
    width=st.integers(1, 18),
    depth=st.integers(1, 700),
    block_n=st.sampled_from([1, 2, 8]),
    block_k=st.sampled_from([64, 256, 1024]),
)


@settings(deadline=None, max_examples=12)
@few_rows_of_any_size
def test_any_sizes_and_any_cut_of_few_rows(rows: int, width: int, depth: int, block_n: int, block_k: int) -> None:
    x, weight = (randn(count, depth, dtype=torch.float32) for count in (rows, width))
    check_few_rows(x, weight, weight, launch.RowCut(block_n=block_n, block_k=block_k, num_warps=1))


def test_no_rows() -> None:
    weight = randn(5, 64, dtype=torch.bfloat16)
    assert launch.streamed_linear(weight[:0], weight, None, counters()).shape == (0, 5)
    assert launch.row_linear(weight[:0], weight, None).shape == (0, 5)


def test_the_depth_is_cut_where_there_are_few_tiles() -> None:
    assert launch.num_splits(1, 100) == launch.MAX_SPLITS
    assert launch.num_splits(1, 3) == 4
    assert launch.num_splits(10_000, 100) == 1
