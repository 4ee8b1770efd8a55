"""The GPU path on tensors of the host: kernels in Triton's interpreter, recordings that run again what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.gpu.runtime import CudaRuntime, GpuRuntime


def runtime_here() -> GpuRuntime:
    """A GPU where there is one, else what stands in for it."""
    return CudaRuntime(torch.device("cuda")) if torch.cuda.is_available() else HostRuntime()


class HostRuntime:
    """An `engine.gpu.runtime.GpuRuntime` without a GPU.

    A recording keeps its one output, as a CUDA graph does, and a fence counts whether somebody waits.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_recordings = 0

    def staging(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept = numbers.clone()
        return lambda: kept

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        out = run()
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            out.copy_(run())

        return replay, out

    def beside(self) -> AbstractContextManager[Callable[[], None]]:
        """All that the host does is done one after the other."""
        return nullcontext(lambda: None)

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """No way is faster than another where nothing is measured."""
        return 0.0

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Nothing is measured, and `test_rehearsal` runs what would be: interpreted it takes its time."""
        return 0

    def taken_bytes(self) -> int:
        """Each recording takes a MiB."""
        return self.num_recordings << 20

    def compile_ahead(self, run: Callable[[], object], num_processes: int, tell: Callable[[int, int], None]) -> None:
        """The interpreter compiles nothing."""
