from __future__ import annotations

from typing import get_args

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kernels.gated_activation.reference import Activation, activate_and_multiply
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near

ACTIVATIONS = get_args(Activation)


def by_kernel(pool: Pool, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    pool.call(f"{activation}_and_multiply", gate_up.dtype, rows, (gate_up, out), (width,))
    return out


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])
    found = activate_and_multiply(torch.cat((gate, up)).unsqueeze(0), "silu")
    torch.testing.assert_close(found, (gate * torch.sigmoid(gate) * up).unsqueeze(0))


def test_gelu_is_that_of_a_normal_distribution_nearly() -> None:
    gate, up = torch.linspace(-4, 4, 41), torch.full((41,), 2.0)
    found = activate_and_multiply(torch.cat((gate, up)).unsqueeze(0), "gelu")
    exact = gate * torch.distributions.Normal(0.0, 1.0).cdf(gate) * up
    torch.testing.assert_close(found, exact.unsqueeze(0), atol=2e-3, rtol=0)


def test_the_clamped_gate_is_that_of_transformers() -> None:
    config = GptOssConfig(hidden_size=4, intermediate_size=50, num_local_experts=1)
    gate_up = torch.randn(9, 100) * 6
    expected = GptOssExperts(config)._apply_gate(gate_up)
    halves = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    torch.testing.assert_close(activate_and_multiply(halves, "clamped"), expected)
    assert halves.abs().max() > 7


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 7), (2, 1500), (40, 96)])
def test_the_kernel_is_the_reference(
    pool: Pool, dtype: torch.dtype, rows: int, width: int, activation: Activation
) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_near(by_kernel(pool, gate_up, activation), activate_and_multiply(gate_up.double(), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero_and_beyond(pool: Pool, dtype: torch.dtype, activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.0, 0.0, 87.0, 89.0, 1e30, -torch.inf, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).to(dtype)
    found, expected = by_kernel(pool, gate_up, activation)[0], activate_and_multiply(gate_up, activation)[0]
    assert torch.equal(found[8:].isfinite(), expected[8:].isfinite())
    assert found[10].isnan()
    torch.testing.assert_close(found[:8], expected[:8], atol=1e-30, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
