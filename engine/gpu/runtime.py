"""CUDA services besides kernels: pinned memory, fences, recorded steps, memory statistics.

The tests have a simulated device under them (`tests.simulated_gpu`), which torch.cuda's names are enough for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise

import torch
from torch.cuda.memory import _cuda_endAllocateToPool  # type: ignore[attr-defined]

_logger = logging.getLogger(__name__)

NUM_WARM_UPS = 2
"""Runs before a recording, in which libraries initialize and kernels are compiled."""
NUM_TIMED = 5
BRANCHES_ARE_WANTED = True
"""Whether recordings use a second stream; `loadtest.gpu` turns it off to measure its gain."""


class CudaRuntime:
    """A GPU through CUDA (or HIP, which torch exposes under the same names).

    Attributes:
        device: where tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Warm-up and capture share a stream: the workspaces that libraries keep per stream then lie outside the pool.
        self._stream, self._side = (torch.cuda.Stream(device) for _ in range(2))
        self.begin_pool()

    def staging(self, count: int) -> torch.Tensor:
        """Return page-locked memory for `count` int64, from which copies to the device are asynchronous."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def fence(self) -> Callable[[], None]:
        """Return a function that waits until everything enqueued so far is done."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def fetch(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying numbers to the host; return a function that waits for them, but for nothing enqueued later."""
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        wait = self.fence()

        def fetched() -> torch.Tensor:
            wait()
            return host

        return fetched

    def only_enqueues(self, run: Callable[[], torch.Tensor]) -> bool:
        """Return whether the host never waits for the device in `run`, as far as torch can tell."""
        # Waiting at the first call, to initialize, does not count.
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            _logger.debug("cannot be recorded: %s", error)
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what `run` enqueues; return the replay function, and the tensor that each replay fills.

        All recordings (CUDA graphs) share one memory pool, as no two run at once.

        Raises:
            RuntimeError: something cannot be recorded; later recordings can be made all the same.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        try:
            return self._capture(run)
        except RuntimeError:
            # Torch 2.11 goes on allocating from the pool of a capture that failed, later releases do not.
            with suppress(RuntimeError):
                _cuda_endAllocateToPool(self.device.index or 0, self._pool)
            self.begin_pool()
            raise

    def begin_pool(self) -> None:
        """Let later recordings share new memory; that of earlier ones is free once they are gone."""
        self._pool = torch.cuda.graph_pool_handle()
        one = partial(torch.zeros, 1, device=self.device)
        one()  # so that its kernel is loaded
        # A pool is freed with its last graph, and its handle cannot be reused: keep one graph for good.
        self._anchor = self._capture(one)

    def _capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Torch does not leave the stream of a capture that fails; the outer context does. Other threads may use the
        # device meanwhile, e.g. to page-lock memory, without breaking the capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            out = run()
        # The first replay takes additional memory and time: take them now.
        graph.replay()
        return graph.replay, out

    @contextmanager
    def beside(self) -> Iterator[Callable[[], None]]:
        """Let what is enqueued inside run concurrently with what follows, until the yielded function is called.

        Only in a recording, where a second stream costs the host nothing later. Tensors made inside must not be used
        after the next `beside`.
        """
        if not (BRANCHES_ARE_WANTED and torch.cuda.is_current_stream_capturing()):
            yield lambda: None
            return
        stream = torch.cuda.current_stream(self.device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            yield lambda: stream.wait_stream(self._side)

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """Return the device time of what `run` enqueues: the shortest of several replays, the least disturbed one."""
        replay, _ = self.record(run)
        # Each is launched while the device is busy with the one before, so that no launch is timed.
        replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        events[-1].synchronize()
        return min(float(start.elapsed_time(end)) for start, end in pairwise(events)) / 1000

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the peak device memory that this process held while `run` ran."""
        torch.cuda.synchronize(self.device)
        # The allocator still caches the memory of weights that were re-laid out.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)

    def taken_bytes(self) -> int:
        """Return how much device memory is in use, by all processes together."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return total_bytes - free_bytes

    def compile_ahead(self, run: Callable[[], object], num_processes: int, tell: Callable[[int, int], None]) -> None:
        """Have other processes compile the kernels that `run` launches; `run` computes nothing meanwhile.

        `tell` is called with how many are done, and of how many.
        """
        # Imported here: users of this file that launch no kernels need no Triton.
        from kernels.triton_cache import compile_ahead

        compile_ahead([run], num_processes, tell)
