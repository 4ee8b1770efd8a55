"""The runner's persistent inputs: filled row by row with numpy, seen by torch without a copy.

They never move, so that a recorded step can be run again over what is in them now.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.attention import AttentionBatch
from engine.config import ResolvedConfig
from engine.decoder.decoder import DecoderBatch
from engine.lora import AdapterSegment
from engine.step import StepPlan, StepRow

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def _zeros(count: int) -> Integers:
    return np.zeros(count, dtype=np.int64)


class InputBuffers:
    """Token ids, positions, slots and block tables of one step, on the host.

    A request's table is kept between steps and only grows, so that a decode step writes one number for each new block.

    Args:
        new: makes room for so many numbers.
    """

    def __init__(self, config: ResolvedConfig, null_block: int, new: Callable[[int], Integers] = _zeros) -> None:
        self._block_tokens = config.block_tokens
        self._null_block = null_block
        self._token_ids = new(config.max_batched_tokens)
        self._positions = new(config.max_batched_tokens)
        self._slots = new(config.max_batched_tokens)
        self._rows = new(4 * config.max_num_seqs).reshape(-1, 4)
        self._sampled = new(config.max_num_seqs)
        self._tables = np.full((config.max_num_seqs, config.max_blocks_per_request), null_block, dtype=np.int64)
        self._num_blocks = np.zeros(config.max_num_seqs, dtype=np.int64)

    def fill(self, plan: StepPlan, adapters: tuple[AdapterSegment, ...] = ()) -> DecoderBatch:
        """Write a plan's rows; returns views that are valid until the next `fill`."""
        at = num_sampled = 0
        for index, row in enumerate(plan.rows):
            self._update_table(row)
            stop = at + row.num_tokens
            if row.num_tokens == 1:
                # Most rows: plain numbers are faster than arrays of one.
                position = row.start
                block = row.block_ids[position // self._block_tokens]
                self._token_ids[at] = row.token_ids()[0]
                self._positions[at] = position
                self._slots[at] = block * self._block_tokens + position % self._block_tokens
            else:
                positions = np.arange(row.start, row.end)
                blocks = self._tables[row.row, positions // self._block_tokens]
                self._token_ids[at:stop] = row.token_ids()
                self._positions[at:stop] = positions
                self._slots[at:stop] = blocks * self._block_tokens + positions % self._block_tokens
            self._rows[index] = at, row.start, row.num_tokens, row.row
            count = row.num_logits
            self._sampled[num_sampled : num_sampled + count] = range(stop - count, stop)
            num_sampled += count
            at = stop
        num_decodes = sum(row.num_tokens == 1 for row in plan.rows)
        return self._batch(at, len(plan.rows), num_sampled, num_decodes, adapters)

    def whole(self) -> DecoderBatch:
        """Return the buffers from end to end, whatever is in them."""
        return self._batch(len(self._token_ids), len(self._rows), len(self._sampled), 0)

    def keep(self, token_ids: torch.Tensor) -> None:
        """Take note of the tokens drawn for the last `fill`; on the host they come by the next one."""

    def fresh_blocks(self, plan: StepPlan) -> list[int]:
        """Return the blocks that this step begins but does not fill."""
        fresh = []
        for row in plan.rows:
            last = (row.end - 1) // self._block_tokens
            if last * self._block_tokens >= row.start and row.end % self._block_tokens:
                fresh.append(row.block_ids[last])
        return fresh

    def _batch(
        self,
        num_tokens: int,
        num_rows: int,
        num_sampled: int,
        num_decodes: int,
        adapters: tuple[AdapterSegment, ...] = (),
    ) -> DecoderBatch:
        return DecoderBatch(
            token_ids=self._seen(self._token_ids)[:num_tokens],
            positions=self._seen(self._positions)[:num_tokens],
            sampled=self._seen(self._sampled)[:num_sampled],
            attention=AttentionBatch(
                slots=self._seen(self._slots)[:num_tokens],
                rows=self._seen(self._rows)[:num_rows],
                tables=self._seen(self._tables),
                block_tokens=self._block_tokens,
                null_block=self._null_block,
                num_decodes=num_decodes,
            ),
            adapters=adapters,
        )

    def _seen(self, array: Integers) -> torch.Tensor:
        """Return an array as the decoder sees it."""
        return torch.from_numpy(array)

    def _update_table(self, row: StepRow) -> None:
        known = 0 if row.is_admission else int(self._num_blocks[row.row])
        count = len(row.block_ids)
        if count > known:
            self._tables[row.row, known:count] = row.block_ids[known:]
        self._num_blocks[row.row] = count
