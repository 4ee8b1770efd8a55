"""What is measured of layers that keep states, on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from loadtest.gpu import states
from loadtest.gpu.state_launches import DeltaLayer, ScanLayer


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries what is measured on a GPU")
@pytest.mark.usefixtures("a_gpu")
def test_steps_and_a_prompt_are_computed_beside_transformers() -> None:
    layers = DeltaLayer(1, 2, 16, 32), ScanLayer(2, 1, 16, 32)
    found = list(states.benches(*layers, torch.device("cuda"), scale=64))
    whats = ("gated delta rule", "causal convolution", "selective scan")
    kinds = [f"{whose}{what}" for what in whats for whose in ("", "transformers' ")]
    assert [one.name for one in found] == [
        f"{kind}, {where}" for where in ("1 rows", "2 rows", "128 tokens") for kind in kinds
    ]
    for one in found:
        one.run()
    # Two states of 2 x 16 x 32 are read and written; 96 numbers come in and 64 go out, with two numbers for each head.
    assert found[6].num_bytes == 2 * (4 * (2 * 2 * 16 * 32 + 2 * 2) + 2 * (96 + 64))
    assert found[10].num_bytes == 2 * (4 * (2 * 2 * 16 * 32 + 2) + 2 * (2 * 32 + 2 * 32))
