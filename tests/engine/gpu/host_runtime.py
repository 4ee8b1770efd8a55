"""The GPU path on tensors of the host: kernels in Triton's interpreter, recordings that run again what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.gpu.runtime import CudaRuntime, GpuRuntime


def runtime_here() -> GpuRuntime:
    """A GPU where there is one, else what stands in for it."""
    return CudaRuntime(torch.device("cuda")) if torch.cuda.is_available() else HostRuntime()


LOOKS = {"item", "tolist", "numpy", "nonzero", "unique", "__bool__", "__int__", "__float__", "__index__"}


class Looks(TorchFunctionMode):
    """Counts the calls that return what a tensor holds, or a tensor of a size that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_looks = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, and call."""
        name = getattr(func, "__name__", "")
        indices = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:2]
        is_masked = name == "__getitem__" and any(getattr(index, "dtype", None) is torch.bool for index in indices)
        self.num_looks += name in LOOKS or is_masked or (name == "where" and len(args) == 1)
        return func(*args, **(kwargs or {}))


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

    def can_record(self, run: Callable[[], torch.Tensor]) -> bool:
        """Only what looks at no numbers, for which a GPU would have to be waited for."""
        with Looks() as looks:
            run()
        return looks.num_looks == 0

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
