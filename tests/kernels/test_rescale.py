from __future__ import annotations

import pytest
import torch

from kernels.program import Pool
from kernels.rescale.reference import rescale
from tests.kernels.conftest import DTYPES, assert_near


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 7), (2, 5000)])
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, softcap: float, rows: int, width: int) -> None:
    x = (torch.randn(rows + 1, width) * 4).to(dtype)
    expected = x.double()
    rescale(expected[:rows], 0.7, softcap)
    pool.call("rescale", dtype, rows, (x,), (width,), (0.7, softcap))
    assert_near(x, expected)


def test_a_cap_is_never_passed_and_what_is_small_stays() -> None:
    x = torch.tensor([[-1e30, -0.01, 0.0, 0.01, torch.inf, torch.nan]])
    rescale(x, 2.0, 30.0)
    torch.testing.assert_close(x, torch.tensor([[-30.0, -0.02, 0.0, 0.02, 30.0, torch.nan]]), equal_nan=True)
