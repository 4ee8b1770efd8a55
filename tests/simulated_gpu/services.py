"""`torch.cuda` of the simulated GPU, as far as the product uses it: streams, events, recordings, page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.simulated_gpu.order import Clock, Stream
from tests.simulated_gpu.tensors import Gpu, Recording, SimulatedTensor, poison

TOTAL_BYTES = 1 << 30
MILLISECONDS = 1.0
"""What everything takes."""
RECORDING_BYTES = 1 << 20
"""What every recording takes."""

# As they are before anything takes their place: a test may ask for a device twice.
_EMPTY, _ZEROS, _DATA = torch.empty, torch.zeros, torch.Tensor.data


class CudaStream:
    """A `torch.cuda.Stream`."""

    _gpu: Gpu

    def __init__(self, device: object = None, *, stream: Stream | None = None) -> None:
        self.stream = self._gpu.order.new_stream() if stream is None else stream

    @property
    def cuda_stream(self) -> int:
        """Which one it is."""
        return self.stream.number

    def wait_stream(self, other: CudaStream) -> None:
        """Have what comes on this stream wait for what is on the other."""
        self._gpu.join(self.stream, other.stream)
        if self._gpu.recording is not None:
            self._gpu.recording.operations.append((self.stream, other.stream))

    def wait_event(self, event: CudaEvent) -> None:
        """Have what comes on this stream wait for an event."""
        self._gpu.forbid_in_recordings()
        with self._gpu.order.lock:
            self.stream.seen |= event.seen

    def synchronize(self) -> None:
        """Have the host wait."""
        self._gpu.forbid_in_recordings()
        self._gpu.order.wait_for(self.stream)


class CudaEvent:
    """A `torch.cuda.Event`."""

    _gpu: Gpu

    def __init__(self, **_: Any) -> None:
        self.seen = Clock()

    def record(self, stream: CudaStream | None = None) -> None:
        """Stand for all that is on a stream, or on the current one."""
        with self._gpu.order.lock:
            self.seen = Clock((self._gpu.order.current if stream is None else stream.stream).seen)

    def synchronize(self) -> None:
        """Have the host wait for it."""
        self._gpu.forbid_in_recordings()
        with self._gpu.order.lock:
            self._gpu.order.host |= self.seen

    def elapsed_time(self, _: CudaEvent) -> float:
        """Return a time."""
        return MILLISECONDS


class CudaGraph:
    """A `torch.cuda.CUDAGraph`: what was recorded is computed again in the same memory."""

    _gpu: Gpu

    def __init__(self) -> None:
        self.recording = Recording()
        self.stream = self._gpu.order.default
        self.is_new = True

    def replay(self) -> None:
        """Enqueue all of it on the current stream, and beside it what was recorded on another."""
        order = self._gpu.order
        current = order.current

        def there(stream: Stream) -> Stream:
            return current if stream is self.stream else stream

        self._gpu.num_replays += 1
        is_first, self.is_new = self.is_new, False
        if is_first and not self._gpu.computes_first_replays:
            return
        try:
            for stream, operation in self.recording.operations:
                order.current = there(stream)
                if isinstance(operation, Stream):
                    self._gpu.join(order.current, there(operation))
                else:
                    operation()
        finally:
            order.current = current


@contextmanager
def recording_of(graph: CudaGraph, *, stream: CudaStream, **_: Any) -> Iterator[None]:
    """Stand for `torch.cuda.graph`."""
    gpu = graph._gpu
    gpu.order.wait_for()
    before, gpu.order.current = gpu.order.current, stream.stream
    graph.stream = stream.stream
    gpu.recording = graph.recording
    try:
        yield
        gpu.num_recordings += 1
        # Not if it fails: torch ends a recording before it leaves the stream, and then that raises.
        gpu.order.current = before
    finally:
        gpu.recording = None
        # A GPU only records: what torch computed all the same is over.
        gpu.order.wait_for()


def replace_services(gpu: Gpu, patch: pytest.MonkeyPatch) -> None:
    """Take the place of torch's functions."""
    order = gpu.order
    # Classes, since others name them in annotations.
    stream_class, event_class, graph_class = (
        type(kind.__name__, (kind,), {"_gpu": gpu}) for kind in (CudaStream, CudaEvent, CudaGraph)
    )

    @contextmanager
    def stream_of(stream: CudaStream) -> Iterator[None]:
        before, order.current = order.current, stream.stream
        try:
            yield
        finally:
            order.current = before

    @contextmanager
    def device_of(_: Any) -> Iterator[None]:
        yield

    def synchronize(_: Any = None) -> None:
        gpu.forbid_in_recordings()
        order.wait_for()

    def set_sync_debug_mode(mode: str) -> None:
        gpu.waits_are_errors = mode == "error"

    for name, value in {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "Stream": stream_class,
        "Event": event_class,
        "CUDAGraph": graph_class,
        "graph": recording_of,
        "graph_pool_handle": lambda: (0, 0),
        "stream": stream_of,
        "device": device_of,
        "current_stream": lambda _=None: stream_class(stream=order.current),
        "default_stream": lambda _=None: stream_class(stream=order.default),
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: gpu.recording is not None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _=None: None,
        "max_memory_reserved": lambda _=None: 0,
        "mem_get_info": lambda _=None: (TOTAL_BYTES - gpu.num_recordings * RECORDING_BYTES, TOTAL_BYTES),
    }.items():
        patch.setattr(torch.cuda, name, value)
    # Looks up, once, the functions whose place is taken now.
    _device_constructors()
    patch.setattr(torch, "empty", _or_pinned(gpu, _EMPTY, is_empty=True))
    patch.setattr(torch, "zeros", _or_pinned(gpu, _ZEROS))
    patch.setattr(torch.Tensor, "data", _data(_DATA))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: _pinned(gpu, tensor.clone()))


def _data(known: Any) -> property:
    """Return `torch.Tensor.data`, by which a tensor of the host can become one of the device."""

    def put(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        if not isinstance(numbers, SimulatedTensor):
            known.__set__(tensor, numbers)
            return
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        torch.utils.swap_tensors(
            tensor, torch.nn.Parameter(numbers, tensor.requires_grad) if is_parameter else numbers.detach()
        )

    return property(known.__get__, put)


def _or_pinned(gpu: Gpu, make: Callable[..., torch.Tensor], *, is_empty: bool = False) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        numbers = make(*args, **kwargs)
        if not pin_memory:
            return numbers
        if is_empty:
            poison(numbers)
        return _pinned(gpu, numbers)

    return made


def _pinned(gpu: Gpu, numbers: torch.Tensor) -> torch.Tensor:
    gpu.forbid_in_recordings()
    return SimulatedTensor.allocated(gpu, numbers, is_pinned=True)
