from __future__ import annotations

import pytest
import torch

from kernels.gated_sum.reference import add_gated
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near


def test_a_closed_gate_adds_nothing_and_an_open_one_all() -> None:
    y, x, delta = torch.ones(2, 3), torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]), torch.full((2, 3), 5.0)
    add_gated(y, x, torch.tensor([[100.0, 0.0, 0.0]]), delta)
    torch.testing.assert_close(y, torch.tensor([[6.0] * 3, [1.0] * 3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 7), (9, 70)])
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, rows: int, width: int) -> None:
    y, x, delta = (torch.randn(rows + 1, width).to(dtype) for _ in range(3))
    gate = (torch.randn(1, width) / width**0.5).to(dtype)
    expected = y.double()
    add_gated(expected[:rows], x[:rows].double(), gate.double(), delta[:rows].double())
    pool.call("add_gated", dtype, rows, (y, x, gate, delta), (width,))
    assert_near(y, expected)
