"""What is measured of layers that keep states, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from kernels.state_launches import DeltaLayer
from loadtest.gpu import states


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries on a CPU what is measured on a GPU")
def test_steps_and_a_prompt_are_computed_beside_transformers() -> None:
    found = list(states.benches(DeltaLayer(1, 2, 16, 32), torch.device("cpu"), scale=64))
    kinds = [
        f"{whose}{what}" for what in ("gated delta rule", "causal convolution") for whose in ("", "transformers' ")
    ]
    assert [one.name for one in found] == [
        f"{kind}, {where}" for where in ("1 rows", "2 rows", "128 tokens") for kind in kinds
    ]
    for one in found:
        one.run()
    # Two states of 2 x 16 x 32 are read and written; 96 numbers come in and 64 go out, with two numbers for each head.
    assert found[4].num_bytes == 2 * 4 * (2 * 2 * 16 * 32 + 96 + 64 + 2 * 2)
