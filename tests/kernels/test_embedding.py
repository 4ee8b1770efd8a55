from __future__ import annotations

import pytest
import torch

from kernels.embedding.reference import take_rows
from kernels.packed_linear.reference import to_panels
from kernels.program import Pool
from tests.kernels.conftest import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_out_of_panels_as_they_went_in(pool: Pool, dtype: torch.dtype) -> None:
    table = torch.randn(50, 24).to(dtype)
    ids = torch.tensor([0, 49, 16, 15, 16, 31, 7])
    found = torch.empty(7, 24, dtype=dtype)
    pool.call("embed", dtype, 7, (to_panels(table), ids, found), (24,))
    assert torch.equal(found, take_rows(table, ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_taken_from_a_plain_matrix(pool: Pool, dtype: torch.dtype) -> None:
    x, indices = torch.randn(9, 5).to(dtype), torch.tensor([8, 0, 3, 3, 1])
    found = torch.empty(5, 5, dtype=dtype)
    pool.call("take_rows", dtype, 5, (x, indices, found), (5,))
    assert torch.equal(found, take_rows(x, indices))
