"""Weights in MXFP4 as they are laid out for a GPU: still the numbers of the checkpoint, in as few bits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.loading.mxfp4 import Mxfp4Weight
from kernels.mxfp4.reference import MAX_EXPONENT, Mxfp4Matrix, can_pack, pack_mxfp4
from tests.oracles.plain_matrices import from_mxfp4, mxfp4_levels


def drawn(out: int, depth: int, dtype: torch.dtype) -> Mxfp4Weight:
    """Draw a weight of all levels and all exponents that have a unit."""
    blocks = torch.randint(0, 256, (out, depth // 2), dtype=torch.uint8)
    exponents = torch.randint(0, MAX_EXPONENT + 1, (out, depth // 32), dtype=torch.uint8)
    return Mxfp4Weight(blocks=blocks, exponents=exponents, dtype=dtype)


def packed(weight: Mxfp4Weight) -> Mxfp4Matrix:
    return pack_mxfp4(weight.blocks, weight.exponents, weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(deadline=None, max_examples=30)
@given(out=st.integers(1, 9), groups=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_matrix_stands_for_the_numbers_of_the_checkpoint(
    dtype: torch.dtype, out: int, groups: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = drawn(out, 32 * groups, dtype)
    matrix = packed(weight)
    assert matrix.shape == weight.shape
    assert torch.equal(mxfp4_levels(matrix.held), weight.levels)
    assert torch.equal(from_mxfp4(matrix), weight.dense())


def test_a_matrix_is_laid_out_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(20, 96, torch.float32)
    whole = packed(weight)
    monkeypatch.setattr("kernels.mxfp4.reference._ROWS", 7)
    parts = packed(weight)
    assert torch.equal(parts.held, whole.held)
    assert torch.equal(parts.units, whole.units)


def test_a_number_takes_half_a_byte_and_a_32nd() -> None:
    matrix = packed(drawn(20, 2880, torch.bfloat16))
    # The last word of units has two bytes that nobody needs.
    assert matrix.held.nbytes + matrix.units.nbytes == 20 * (2880 // 2 + 2880 // 32 + 2)


def test_exponents_without_a_unit_are_known() -> None:
    for exponent, can in ((0, True), (MAX_EXPONENT, True), (MAX_EXPONENT + 1, False), (255, False)):
        assert can_pack(torch.tensor([[127, exponent]], dtype=torch.uint8)) is can
