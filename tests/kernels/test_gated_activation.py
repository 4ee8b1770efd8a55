from __future__ import annotations

import pytest
import torch

from kernels.gated_activation.reference import silu_and_multiply
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near


def by_kernel(pool: Pool, gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    pool.call("silu_and_multiply", gate_up.dtype, rows, (gate_up, out), (width,))
    return out


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])
    found = silu_and_multiply(torch.cat((gate, up)).unsqueeze(0))
    torch.testing.assert_close(found, (gate * torch.sigmoid(gate) * up).unsqueeze(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 7), (2, 1500), (40, 96)])
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_near(by_kernel(pool, gate_up), silu_and_multiply(gate_up.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero_and_beyond(pool: Pool, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.0, 0.0, 87.0, 89.0, 1e30, -torch.inf, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).to(dtype)
    found, expected = by_kernel(pool, gate_up)[0], silu_and_multiply(gate_up)[0]
    assert not found[8:].isfinite().any()
    assert found[10].isnan()
    torch.testing.assert_close(found[:8], expected[:8], atol=1e-30, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
