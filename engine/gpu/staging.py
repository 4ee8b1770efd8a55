"""Numbers on their way to a GPU: copied from page-locked memory while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.gpu.runtime import CudaRuntime

NUM_BUFFERS = 2
"""One for the step being prepared and one for the step under way, so that nobody waits for a copy."""


class Staging:
    """One int64 array on the device, at a fixed address, and the host buffers that it is written from."""

    def __init__(self, count: int, runtime: CudaRuntime) -> None:
        self.device = torch.zeros(count, dtype=torch.int64, device=runtime.device)
        self._runtime = runtime
        self._buffers = [runtime.staging(count) for _ in range(NUM_BUFFERS)]
        self._waits: list[Callable[[], None]] = [lambda: None] * NUM_BUFFERS
        self._next = 0

    def send(self, numbers: torch.Tensor) -> None:
        """Enqueue a copy of int64 `numbers` to the front of the array; the caller may change them at once."""
        index, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        self._waits[index]()
        count = len(numbers)
        held = self._buffers[index][:count]
        # By torch, all threads of the process would copy a large step, and each step would wait for the slowest.
        np.copyto(held.numpy(), numbers.numpy())
        self.device[:count].copy_(held, non_blocking=True)
        self._waits[index] = self._runtime.fence()

    def send_list(self, numbers: Sequence[int]) -> None:
        """Do the same with plain numbers."""
        self.send(torch.tensor(numbers, dtype=torch.int64))
