"""The runner's inputs on a GPU: written on the host, sent in one copy, and padded to recorded sizes.

    host     [ token ids | positions | slots | rows | sampled | drawn rows | grown: pairs of (index, block) ]
    device   [ the same ]    at fixed addresses

Block tables stay on the device too, and only new entries are written there. If the previous step is still drawing a
row's token, `put_drawn` takes it from the device, which keeps the last token of every row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.buffers import InputBuffers, Integers
from engine.config import ResolvedConfig
from engine.decoder.decoder import DecoderBatch
from engine.gpu.runtime import CudaRuntime
from engine.gpu.staging import Staging
from engine.lora import AdapterSegment
from engine.scheduling.live_request import PENDING
from engine.step import StepPlan
from kernels.embedding.launch import put_drawn

NO_SLOT = -1
"""Slot of a padding token."""

MAX_GAPS = 6
"""Numbers left between arrays to align each to 16 bytes: other alignments would recompile kernels."""


class DeviceInputs(InputBuffers):
    """`InputBuffers` whose batches are on a GPU.

    A step with one token per row is padded with rows of no tokens to the next of `sizes`. `num_samples` is how many of
    its logits are wanted, and `has_pending` is whether `put_drawn` has anything to do.
    """

    def __init__(
        self, config: ResolvedConfig, null_block: int, runtime: CudaRuntime, sizes: Sequence[int] = ()
    ) -> None:
        self._sizes = sorted(size for size in sizes if size <= config.max_num_seqs)
        # The most table entries that a step adds: blocks for new tokens, and for admissions those found in the cache.
        num_tables = len(config.windows)
        max_grown = num_tables * config.max_num_seqs * (config.max_blocks_per_request + 1)
        num_by_token = (2 + num_tables) * config.max_batched_tokens
        most = num_by_token + 5 * config.max_num_seqs + config.num_logits + 2 * max_grown
        self._numbers: Integers = np.zeros(most + num_tables + MAX_GAPS, dtype=np.int64)
        self._num_taken = 0
        self._staging = Staging(len(self._numbers), runtime)
        super().__init__(config, null_block, self._take)
        self._drawn_rows = self._take(config.max_num_seqs)
        self._grown = self._take(2 * max_grown).reshape(-1, 2)
        self._num_fixed = self._num_taken - self._grown.size
        self._num_grown = 0
        self._device_tables = torch.zeros(self._tables.shape, dtype=torch.int64, device=runtime.device)
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=runtime.device)
        self._device_by_array: dict[int, torch.Tensor] = {}
        self._batch_by_size: dict[int, DecoderBatch] = {}
        self.num_samples = 0
        self.has_pending = False

    def fill(self, plan: StepPlan, adapters: tuple[AdapterSegment, ...] = ()) -> DecoderBatch:
        """Write a plan's rows and enqueue their copy; the returned batch is valid until the next `fill`."""
        self._num_grown = 0
        drawn_rows = [row.row for row in plan.rows if row.samples]
        self._num_drawn = len(drawn_rows)
        self._drawn_rows[: self._num_drawn] = drawn_rows
        return super().fill(plan, adapters)

    def padding(self, size: int) -> DecoderBatch:
        """Return a batch of `size` padding rows; every later batch of that size has the same addresses."""
        self._num_grown = 0
        self._pad(0, size)
        return self._batch(size, size, size, size)

    def put_drawn(self, batch: DecoderBatch) -> None:
        """Enqueue replacing pending token ids by those that the previous step draws; can be recorded."""
        rows, num_decodes = batch.attention[0].rows, batch.attention[0].num_decodes
        put_drawn(batch.token_ids[:num_decodes], rows[:num_decodes], self._last_tokens, PENDING)

    def padded(self, num_rows: int) -> int:
        """Return the padded size of a step with `num_rows` rows of one token."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else num_rows

    def fresh_blocks(self, plan: StepPlan) -> list[int]:
        """Return no blocks: attention here reads no slot past a row's own, so none need be cleared."""
        return []

    def keep(self, token_ids: torch.Tensor) -> None:
        """Keep the tokens drawn for the last `fill`: a row's next step may come before the host knows its token."""
        rows = self._seen(self._drawn_rows)[: self._num_drawn]
        self._last_tokens.scatter_(0, rows, token_ids)

    def _batch(
        self,
        num_tokens: int,
        num_rows: int,
        num_sampled: int,
        num_decodes: int,
        adapters: tuple[AdapterSegment, ...] = (),
    ) -> DecoderBatch:
        self.num_samples = num_sampled
        self.has_pending = bool((self._token_ids[:num_decodes] == PENDING).any())
        size = self.padded(num_rows) if num_decodes == num_tokens == num_sampled else 0
        if size:
            self._pad(num_rows, size)
            num_tokens = num_rows = num_sampled = num_decodes = size
        self._staging.send(torch.from_numpy(self._numbers[: self._num_fixed + 2 * self._num_grown]))
        if self._num_grown:
            grown = self._seen(self._grown)[: self._num_grown]
            self._device_tables.view(-1).scatter_(0, grown[:, 0], grown[:, 1])
        batch = self._batch_by_size.get(size)
        if batch is None:
            batch = super()._batch(num_tokens, num_rows, num_sampled, num_decodes)
            batch = replace(batch, samples_each=bool(size), host_rows=self._rows[:num_rows])
            if size:
                self._batch_by_size[size] = batch
        return replace(batch, adapters=adapters) if adapters else batch

    def _pad(self, start: int, end: int) -> None:
        if start == end:
            return
        self._token_ids[start:end] = self._positions[start:end] = 0
        for slots in self._slots:
            slots[start:end] = NO_SLOT
        self._rows[start:end] = 0
        self._rows[start:end, 0] = self._sampled[start:end] = range(start, end)

    def _extend_table(self, table: int, row: int, known: int, block_ids: Sequence[int]) -> None:
        super()._extend_table(table, row, known, block_ids)
        end = self._num_grown + len(block_ids)
        start = (table * self._tables.shape[1] + row) * self._tables.shape[2] + known
        self._grown[self._num_grown : end, 0] = range(start, start + len(block_ids))
        self._grown[self._num_grown : end, 1] = block_ids
        self._num_grown = end

    def _take(self, count: int) -> Integers:
        start = self._num_taken + self._num_taken % 2
        self._num_taken = start + count
        return self._numbers[start : self._num_taken]

    def _seen(self, array: Integers) -> torch.Tensor:
        if array is self._tables:
            return self._device_tables
        if id(array) not in self._device_by_array:
            offset = (array.ctypes.data - self._numbers.ctypes.data) // array.itemsize
            self._device_by_array[id(array)] = self._staging.device[offset : offset + array.size].view(array.shape)
        return self._device_by_array[id(array)]
