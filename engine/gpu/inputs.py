"""The runner's inputs on a GPU: written on the host as anywhere, taken over by one copy, and padded to recorded sizes.

    host     [ token ids | positions | slots | rows | sampled | grown: where, what ]    page-locked
    device   [ the same ]                                                               at addresses that never change

Block tables are on the device too, and only what has grown is written there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from engine.buffers import InputBuffers, Integers
from engine.config import ResolvedConfig
from engine.decoder.decoder import DecoderBatch
from engine.gpu.runtime import GpuRuntime
from engine.lora import AdapterSegment
from engine.step import StepPlan, StepRow

NO_SLOT = -1
"""Of a token that only fills up a batch."""


class DeviceInputs(InputBuffers):
    """`InputBuffers` whose batches are on a GPU.

    A step of one token for each row is padded with rows of no tokens to the next of `sizes`; `num_samples` says how
    many of its logits are asked for.
    """

    def __init__(self, config: ResolvedConfig, null_block: int, runtime: GpuRuntime, sizes: Sequence[int] = ()) -> None:
        self._runtime = runtime
        self._sizes = sorted(size for size in sizes if size <= config.max_num_seqs)
        self._max_grown = 2 * config.max_num_seqs
        num_numbers = 3 * config.max_batched_tokens + 5 * config.max_num_seqs + 2 * self._max_grown
        self._host = runtime.staging(num_numbers)
        self._device = torch.zeros(num_numbers, dtype=torch.int64, device=runtime.device)
        self._num_taken = 0
        super().__init__(config, null_block, self._take)
        self._grown_at, self._grown = self._take(self._max_grown), self._take(self._max_grown)
        self._num_grown = 0
        self._host_tables = runtime.staging(self._tables.size).view(self._tables.shape)
        self._tables = self._host_tables.numpy()
        self._device_tables = torch.zeros(self._tables.shape, dtype=torch.int64, device=runtime.device)
        self._wait: Callable[[], None] = lambda: None
        self.num_samples = 0

    def fill(self, plan: StepPlan, adapters: tuple[AdapterSegment, ...] = ()) -> DecoderBatch:
        """Write a plan's rows and enqueue their copy; the batch is valid until the next `fill`."""
        # What the step before copies may still be on its way out of these buffers.
        self._wait()
        self._num_grown = 0
        return super().fill(plan, adapters)

    def padding(self, size: int) -> DecoderBatch:
        """Return a batch of `size` rows of no tokens, at the addresses of every later one of that size."""
        self._wait()
        self._num_grown = 0
        self._pad(0, size)
        return self._batch(size, size, size, size)

    def padded(self, num_rows: int) -> int:
        """Return the size that a step of `num_rows` rows of one token has."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else num_rows

    def _batch(
        self,
        num_tokens: int,
        num_rows: int,
        num_sampled: int,
        num_decodes: int,
        adapters: tuple[AdapterSegment, ...] = (),
    ) -> DecoderBatch:
        self.num_samples = num_sampled
        if num_decodes == num_tokens == num_sampled:
            size = self.padded(num_rows)
            self._pad(num_rows, size)
            num_tokens = num_rows = num_sampled = num_decodes = size
        self._device.copy_(self._host, non_blocking=True)
        if self._num_grown:
            at, blocks = (self._seen(array)[: self._num_grown] for array in (self._grown_at, self._grown))
            self._device_tables.view(-1).scatter_(0, at, blocks)
        self._wait = self._runtime.fence()
        return super()._batch(num_tokens, num_rows, num_sampled, num_decodes, adapters)

    def _pad(self, start: int, end: int) -> None:
        self._token_ids[start:end] = self._positions[start:end] = 0
        self._slots[start:end] = NO_SLOT
        self._rows[start:end] = 0
        self._rows[start:end, 0] = self._sampled[start:end] = range(start, end)

    def _update_table(self, row: StepRow) -> None:
        known = 0 if row.is_admission else int(self._num_blocks[row.row])
        super()._update_table(row)
        count = len(row.block_ids)
        room = self._max_grown - self._num_grown
        if count - known > min(room, 2):
            # A prompt's blocks: many at once, and rarely.
            self._device_tables[row.row, known:count].copy_(self._host_tables[row.row, known:count], non_blocking=True)
            return
        for index in range(known, count):
            self._grown_at[self._num_grown] = row.row * self._tables.shape[1] + index
            self._grown[self._num_grown] = self._tables[row.row, index]
            self._num_grown += 1

    def _take(self, count: int) -> Integers:
        start, self._num_taken = self._num_taken, self._num_taken + count
        array: Integers = self._host[start : self._num_taken].numpy()
        return array

    def _seen(self, array: Integers) -> torch.Tensor:
        if array is self._tables:
            return self._device_tables
        offset = (array.ctypes.data - self._host.data_ptr()) // array.itemsize
        return self._device[offset : offset + array.size].view(array.shape)
