"""Tensors of the simulated GPU: numbers in the host's memory, with the device and the rules of a GPU's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tests.simulated_gpu.order import GRAIN, Block, Grains, Order, Stream, where
from tests.simulated_gpu.programs import Programs

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")


@dataclass(slots=True)
class Recording:
    """What a recording enqueues, and on which stream each; a stream in the place of an operation is waited for.

    Attributes:
        memory: what was allocated meanwhile, which the recording keeps.
    """

    operations: list[tuple[Stream, Stream | Callable[[], None]]] = field(default_factory=list)
    memory: list[Hold] = field(default_factory=list)


class Gpu:
    """One simulated device, and what is being recorded on it.

    Attributes:
        computes_first_replays: whether recordings are computed as they are replayed for the first time, in a start.
    """

    def __init__(self) -> None:
        self.computes_first_replays = True
        self.order = Order()
        self.programs = Programs(self.order)
        self.blocks = Blocks(self.order)
        self.waits_are_errors = False
        self.num_replays = self.num_recordings = 0
        self._local = threading.local()

    @property
    def recording(self) -> Recording | None:
        """What this thread records."""
        return getattr(self._local, "recording", None)

    @recording.setter
    def recording(self, recording: Recording | None) -> None:
        self._local.recording = recording

    def note(self, accesses: Sequence[Access]) -> None:
        """Enqueue an operation that makes these accesses."""
        with self.order.lock:
            self.order.start()
            for access in accesses:
                if self.blocks.at(access.block.start) is not access.block and access.block.end > access.block.start:
                    self.order.fault("memory is used that was freed")
                self.order.access(access.block, access.grains, is_write=access.is_write)

    def note_operator(self, accesses: Sequence[Access]) -> None:
        """Enqueue an operator of torch, which starts when all launches before it have ended."""
        self.note(accesses)
        self.programs.end_all(self.order.current)

    def join(self, stream: Stream, other: Stream) -> None:
        """Have what comes on a stream wait for what is on another."""
        with self.order.lock:
            self.order.join(stream, other)
            self.programs.end_all(stream)

    def forbid_in_recordings(self) -> None:
        """Raise RuntimeError if this thread records."""
        if self.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def wait(self, why: str) -> None:
        """Have the host wait for this thread's stream, without having asked for it.

        Raises:
            RuntimeError: this is forbidden now, as it is to a recording.
        """
        if self.recording is not None or self.waits_are_errors:
            raise RuntimeError(f"operation not permitted when stream is capturing, or waits: {why}")
        with self.order.lock:
            self.order.waits.append(f"{why}\n{where()}")
        self.order.wait_for(self.order.current)


class Blocks:
    """All memory that the device can reach, by address."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._block_by_start: dict[int, Block] = {}
        self._starts: NDArray[np.int64] | None = None

    def add(self, elem: torch.Tensor, *, is_pinned: bool) -> Block:
        """Note an allocation."""
        storage = elem.untyped_storage()
        start = storage.data_ptr()
        stream = None if is_pinned else self._order.current
        block = Block(start=start, end=start + storage.nbytes(), stream=stream, owner=storage)
        if start:
            with self._order.lock:
                self._block_by_start[start] = block
                self._starts = None
        return block

    def remove(self, block: Block) -> None:
        """Note that memory is free."""
        self._order.free(block)
        with self._order.lock:
            if self._block_by_start.get(block.start) is block:
                del self._block_by_start[block.start]
                self._starts = None

    def at(self, address: int) -> Block | None:
        """Return the memory that an address lies in."""
        with self._order.lock:
            if self._starts is None:
                self._starts = np.array(sorted(self._block_by_start), dtype=np.int64)
            index = int(np.searchsorted(self._starts, address, side="right")) - 1
            block = self._block_by_start[int(self._starts[index])] if index >= 0 else None
        return block if block is not None and address < block.end else None


class Access(NamedTuple):
    """What an operation reads or writes of a block."""

    block: Block
    grains: Grains
    is_write: bool


class Hold:
    """Frees a block with the last tensor that shares it."""

    def __init__(self, gpu: Gpu, block: Block) -> None:
        self.gpu = gpu
        self.block = block

    def __del__(self) -> None:
        self.gpu.blocks.remove(self.block)


class SimulatedTensor(torch.Tensor):
    """A tensor on the device, or in page-locked memory of the host."""

    elem: torch.Tensor
    hold: Hold
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor, hold: Hold) -> SimulatedTensor:
        # A view of a usual tensor is a usual one, whatever the mode.
        with torch.inference_mode(mode=False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                device=HOST if hold.block.stream is None else DEVICE,
            )
        made.elem, made.hold = elem, hold
        return made

    @classmethod
    def allocated(cls, gpu: Gpu, elem: torch.Tensor, *, is_pinned: bool = False) -> SimulatedTensor:
        """Return a tensor of memory of its own."""
        hold = Hold(gpu, gpu.blocks.add(elem, is_pinned=is_pinned))
        if gpu.recording is not None:
            gpu.recording.memory.append(hold)
            hold.block.is_recorded = True
        return cls(elem, hold)

    @property
    def is_on_host(self) -> bool:
        """Whether it is page-locked memory."""
        return self.hold.block.stream is None

    def grains(self) -> Grains:
        """Return what of its block it covers."""
        offset = self.elem.data_ptr() - self.hold.block.start
        size = self.elem.element_size()
        order = sorted(range(self.elem.dim()), key=self.elem.stride, reverse=True)
        if self.elem.permute(order).is_contiguous():
            return slice(offset // GRAIN, -(-(offset + self.elem.numel() * size) // GRAIN))
        places = np.zeros(1, dtype=np.int64)
        for count, stride in zip(self.elem.shape, self.elem.stride(), strict=True):
            places = (places[:, None] + np.arange(count) * stride).reshape(-1)
        return grains_of(places * size + offset, size)

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        return self._seen("tolist").tolist()

    def numpy(self, **_: Any) -> Any:
        assert self.is_on_host, "can't convert cuda:0 device type tensor to numpy"
        # Whoever has the array may write to it.
        self.hold.gpu.order.access_by_host(self.hold.block, self.grains(), is_write=True)
        return self.elem.numpy()

    def pin_memory(self, *_: Any) -> torch.Tensor:
        return self

    def is_pinned(self, *_: Any) -> bool:
        return self.is_on_host

    def record_stream(self, stream: Any) -> None:
        self.hold.block.kept_for.add(stream.stream.number)

    def _seen(self, why: str) -> torch.Tensor:
        gpu = self.hold.gpu
        if self.is_on_host:
            gpu.order.access_by_host(self.hold.block, self.grains(), is_write=False)
        else:
            gpu.wait(why)
        return self.elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.simulated_gpu.operators import called

        return called(func, args, kwargs or {})


def grains_of(places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the grains of elements of `size` bytes at byte offsets."""
    grains = np.concatenate([(places + at) // GRAIN for at in range(0, size, GRAIN)])
    first, last = (grains.min(), grains.max()) if grains.size else (0, 0)
    if last - first > 8 * grains.size:
        return np.unique(grains)
    is_covered = np.zeros(last - first + 1, dtype=bool)
    is_covered[grains - first] = True
    return np.flatnonzero(is_covered) + first


def poison(elem: torch.Tensor, *, is_recorded: bool = False) -> None:
    """Fill memory with what nobody would take for a result.

    While a recording is made, kernels do not run, but torch's operators do: there integers must do as indices.
    """
    if elem.is_floating_point():
        elem.fill_(torch.nan)
    elif elem.dtype is not torch.bool:
        elem.fill_(0 if is_recorded else torch.iinfo(elem.dtype).max // 3)
