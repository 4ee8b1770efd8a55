"""The runner's persistent input buffers: filled row by row with numpy, viewed by torch without a copy.

Their addresses never change, so that a recorded step can be replayed over their current content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

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
    """Token ids, positions, slot mapping and block tables of one step, on the host.

    A request's block tables are kept between steps and only grow, so that a decode step writes one number per new
    block; blocks that it has released stay in them.

    Args:
        new: allocates an array of this many zeros.
    """

    def __init__(self, config: ResolvedConfig, null_block: int, new: Callable[[int], Integers] = _zeros) -> None:
        self._block_tokens = config.block_tokens
        self._null_block = null_block
        self._token_ids = new(config.max_batched_tokens)
        self._positions = new(config.max_batched_tokens)
        self._slots = [new(config.max_batched_tokens) for _ in config.windows]
        self._rows = new(4 * config.num_rows).reshape(-1, 4)
        self._sampled = new(config.num_logits)
        # An even number of columns: on a GPU a table's address must be a multiple of 16 bytes.
        width = config.max_blocks_per_request + config.max_blocks_per_request % 2
        self._windows = config.windows
        self._tables = np.full((len(config.windows), config.num_rows, width), null_block, dtype=np.int64)
        self._num_blocks = [[0] * config.num_rows for _ in config.windows]
        self._slots_by_table = list(zip(self._tables, self._slots, strict=True))

    def fill(self, plan: StepPlan, adapters: tuple[AdapterSegment, ...] = ()) -> DecoderBatch:
        """Write a plan's rows; return views that are valid until the next `fill`."""
        self._update_tables(plan.rows)
        at = num_decodes = plan.num_decodes
        decodes = plan.rows[:num_decodes]
        # Most rows are decodes: written column by column, as numpy's cost per assignment exceeds that per number.
        self._token_ids[:at] = [row.first_token_id for row in decodes]
        self._positions[:at] = self._rows[:at, 1] = [row.start for row in decodes]
        self._rows[:at, 0] = range(at)
        self._rows[:at, 2] = 1
        self._rows[:at, 3] = [row.row for row in decodes]
        self._put_slots(0, self._rows[:at, 3], self._positions[:at])
        sampled = [index for index, row in enumerate(decodes) if row.num_logits]
        for index, row in enumerate(plan.rows[num_decodes:], num_decodes):
            stop = at + row.num_tokens
            positions = np.arange(row.start, row.stop)
            self._rows[index] = at, row.start, row.num_tokens, row.row
            self._token_ids[at:stop] = row.token_ids()
            self._positions[at:stop] = positions
            self._put_slots(at, row.row, positions)
            sampled += range(stop - row.num_logits, stop)
            at = stop
        self._sampled[: len(sampled)] = sampled
        return self._batch(at, len(plan.rows), len(sampled), num_decodes, adapters)

    def whole(self) -> DecoderBatch:
        """Return views of the full buffers, whatever they contain."""
        return self._batch(len(self._token_ids), len(self._rows), len(self._sampled), 0)

    def keep(self, token_ids: torch.Tensor) -> None:
        """Record the tokens drawn for the last `fill`; a no-op on the host, where the next plan contains them."""

    def fresh_blocks(self, plan: StepPlan) -> list[int]:
        """Return the blocks that this step starts but does not fill."""
        fresh: list[int] = []
        for row in plan.rows:
            last = (row.stop - 1) // self._block_tokens
            if last * self._block_tokens >= row.start and row.stop % self._block_tokens:
                fresh.extend(blocks[last] for blocks in row.block_tables)
        return fresh

    def _batch(
        self,
        num_tokens: int,
        num_rows: int,
        num_sampled: int,
        num_decodes: int,
        adapters: tuple[AdapterSegment, ...] = (),
    ) -> DecoderBatch:
        rows = self._seen(self._rows)[:num_rows]
        return DecoderBatch(
            token_ids=self._seen(self._token_ids)[:num_tokens],
            positions=self._seen(self._positions)[:num_tokens],
            sampled=self._seen(self._sampled)[:num_sampled],
            attention=tuple(
                AttentionBatch(
                    slots=self._seen(slots)[:num_tokens],
                    rows=rows,
                    tables=table,
                    block_tokens=self._block_tokens,
                    null_block=self._null_block,
                    num_decodes=num_decodes,
                    window=window,
                )
                for slots, table, window in zip(self._slots, self._seen_tables, self._windows, strict=True)
            ),
            adapters=adapters,
        )

    def _put_slots(self, start: int, rows: Integers | int, positions: Integers) -> None:
        """Write the slot mapping of consecutive tokens, from index `start` of the batch on."""
        blocks, offsets = np.divmod(positions, self._block_tokens)
        for table, slots in self._slots_by_table:
            slots[start : start + len(positions)] = table[rows, blocks] * self._block_tokens + offsets

    @cached_property
    def _seen_tables(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._seen(self._tables))

    def _seen(self, array: Integers) -> torch.Tensor:
        """Return the tensor through which the decoder reads an array."""
        return torch.from_numpy(array)

    def _update_tables(self, rows: Sequence[StepRow]) -> None:
        for table, num_blocks in enumerate(self._num_blocks):
            for row in rows:
                blocks = row.block_tables[table]
                known, count = 0 if row.is_admission else num_blocks[row.row], len(blocks)
                if count != known:
                    num_blocks[row.row] = count
                    self._extend_table(table, row.row, known, blocks[known:])

    def _extend_table(self, table: int, row: int, known: int, block_ids: Sequence[int]) -> None:
        """Append blocks to one of a row's tables, after the first `known`."""
        self._tables[table, row, known : known + len(block_ids)] = block_ids
