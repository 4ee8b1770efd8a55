"""What the GPU path asks of CUDA besides kernels: pinned memory, fences, recorded steps, memory in numbers.

One object, so that everything else here runs, and is tested, on tensors of any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

NUM_WARM_UPS = 2
"""Runs before a recording: libraries set themselves up, kernels are compiled."""
NUM_TIMED = 5
BRANCHES_ARE_WANTED = True
"""`loadtest.gpu` has parts without."""


class GpuRuntime(Protocol):
    """One device."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    def staging(self, count: int) -> torch.Tensor:
        """Return room for `count` int64 on the host, from which copies to the device are asynchronous."""
        ...

    def fence(self) -> Callable[[], None]:
        """Return what waits until all that has been enqueued so far is done."""
        ...

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to bring numbers to the host; return what waits for them, and for nothing enqueued later."""
        ...

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what `run` enqueues; return what enqueues it again, and the tensor that each replay fills."""
        ...

    def beside(self) -> AbstractContextManager[Callable[[], None]]:
        """Have what is enqueued inside run beside what comes after it, up to the call of what this gives.

        Tensors that are made inside are used no longer than until the next time.
        """
        ...

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """Return how long the device takes for what `run` enqueues, the host's part left out."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the most memory that this process held while `run` ran."""
        ...

    def taken_bytes(self) -> int:
        """Return how much of the device's memory is taken, by whomever and for whatever."""
        ...

    def compile_ahead(self, run: Callable[[], object], num_processes: int, tell: Callable[[int, int], None]) -> None:
        """Compile the kernels that `run` launches, many side by side; `run` computes nothing meanwhile.

        `tell` is told how many are done, and of how many.
        """
        ...


class CudaRuntime:
    """A GPU by CUDA (or HIP, which torch calls the same)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for warming up and for capturing: what libraries keep for each stream then lies outside of the pool.
        self._stream, self._side = (torch.cuda.Stream(device) for _ in range(2))
        # A pool goes with the last of its graphs, and its handle cannot be used again: one graph is kept for good.
        self._anchor = self.record(lambda: torch.zeros(1, device=device))

    def staging(self, count: int) -> torch.Tensor:
        """Return page-locked memory."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def fence(self) -> Callable[[], None]:
        """Record an event."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy to page-locked memory and record an event."""
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        wait = self.fence()

        def fetched() -> torch.Tensor:
            wait()
            return host

        return fetched

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a CUDA graph; all graphs share one pool of memory, for no two run at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do with the device meanwhile, page-locking memory say, does not spoil the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        # What a first replay takes of memory and time is taken here.
        graph.replay()
        return graph.replay, out

    @contextmanager
    def beside(self) -> Iterator[Callable[[], None]]:
        """Go to a stream of its own in a recording, where that costs the host nothing later; elsewhere do nothing."""
        if not (BRANCHES_ARE_WANTED and torch.cuda.is_current_stream_capturing()):
            yield lambda: None
            return
        stream = torch.cuda.current_stream(self.device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            yield lambda: stream.wait_stream(self._side)

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """Replay a recording some times by the device's own clock; the shortest time is the least disturbed one."""
        replay, _ = self.record(run)
        times: list[float] = []
        for _ in range(NUM_TIMED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1000)
        return min(times)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Ask torch's allocator."""
        torch.cuda.synchronize(self.device)
        # Weights that were laid out anew have left their old places behind.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)

    def taken_bytes(self) -> int:
        """Ask the driver, when torch has given back what it only keeps."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return total_bytes - free_bytes

    def compile_ahead(self, run: Callable[[], object], num_processes: int, tell: Callable[[int, int], None]) -> None:
        """Note what is launched instead of launching it, and have other processes fill Triton's cache."""
        # Whatever uses this file without kernels needs no Triton.
        from kernels.triton_cache import compile_ahead

        compile_ahead([run], num_processes, tell)
