"""What only a GPU can show of `engine.gpu.runtime`."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.runtime import CudaRuntime


@pytest.mark.gpu
def test_a_recording_with_branches_does_everything_in_its_place() -> None:
    """Many of them, whose results all take over the places of those before."""
    runtime = CudaRuntime(torch.device("cuda"))
    x = torch.zeros(1 << 20, device="cuda")

    def run() -> torch.Tensor:
        total = torch.zeros_like(x)
        for number in range(64):
            source = x + number
            with runtime.beside() as join:
                doubled = (source * 2).sin()
            total += source.cos()
            join()
            total += doubled
        return total

    replay, out = runtime.record(run)
    for value in (0.5, -3.0):
        x.fill_(value)
        replay()
        torch.testing.assert_close(out, run())
