"""The runner's persistent inputs: filled row by row with numpy, seen by torch without a copy."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention import AttentionBatch, Chunk, DecodeGroup, chunk_mask
from engine.config import ResolvedConfig
from engine.step import StepPlan, StepRow

MAX_PADDING = 2
"""Single-token rows are gathered together while the longest has at most this many times the blocks of the shortest."""


class InputBuffers:
    """Token ids, positions, slots and block tables of one step, on the host.

    A row's table is kept between steps and only grows, so that a decode step writes one number for each new block.
    """

    def __init__(self, config: ResolvedConfig, null_block: int) -> None:
        self._block_tokens = config.block_tokens
        self._null_block = null_block
        self._token_ids = np.zeros(config.max_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(config.max_batched_tokens, dtype=np.int64)
        self._slots = np.zeros(config.max_batched_tokens, dtype=np.int64)
        self._tables = np.full((config.max_num_seqs, config.max_blocks_per_request), null_block, dtype=np.int64)
        self._num_blocks = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._offsets = torch.arange(config.max_blocks_per_request * config.block_tokens)

    def fill(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """Write a plan's rows; returns (token ids, positions, attention batch), views valid until the next `fill`."""
        at = 0
        chunks: list[Chunk] = []
        for row in plan.rows:
            self._update_table(row)
            stop = at + row.num_tokens
            self._token_ids[at:stop] = row.token_ids()
            positions = np.arange(row.start, row.end)
            self._positions[at:stop] = positions
            blocks = self._tables[row.row, positions // self._block_tokens]
            self._slots[at:stop] = blocks * self._block_tokens + positions % self._block_tokens
            if row.num_tokens > 1:
                chunks.append(self._chunk(row, at, stop))
            at = stop
        attention = AttentionBatch(
            slots=torch.from_numpy(self._slots[:at]), decodes=self._decode_groups(plan), chunks=tuple(chunks)
        )
        return torch.from_numpy(self._token_ids[:at]), torch.from_numpy(self._positions[:at]), attention

    def fresh_blocks(self, plan: StepPlan) -> list[int]:
        """Return the blocks that this step begins but does not fill."""
        fresh = []
        for row in plan.rows:
            last = (row.end - 1) // self._block_tokens
            if last * self._block_tokens >= row.start and row.end % self._block_tokens:
                fresh.append(row.block_ids[last])
        return fresh

    def _update_table(self, row: StepRow) -> None:
        known = 0 if row.is_admission else int(self._num_blocks[row.row])
        count = len(row.block_ids)
        if count > known:
            self._tables[row.row, known:count] = row.block_ids[known:]
        if row.is_admission:
            self._tables[row.row, count:] = self._null_block
        self._num_blocks[row.row] = count

    def _decode_groups(self, plan: StepPlan) -> tuple[DecodeGroup, ...]:
        """Group the plan's single-token rows by length: a short row would be padded to the longest of its group."""
        offsets = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
        singles = [
            (row.end, int(at), row.row) for row, at in zip(plan.rows, offsets, strict=False) if row.end - row.start == 1
        ]
        singles.sort()
        groups: list[list[tuple[int, int, int]]] = []
        for single in singles:
            if not groups or self._blocks_of(single[0]) > MAX_PADDING * self._blocks_of(groups[-1][0][0]):
                groups.append([])
            groups[-1].append(single)
        return tuple(self._decode_group(group) for group in groups)

    def _decode_group(self, singles: list[tuple[int, int, int]]) -> DecodeGroup:
        ends, tokens, rows = (np.array(column) for column in zip(*singles, strict=True))
        num_blocks = self._blocks_of(int(ends[-1]))
        tables = self._tables[rows, :num_blocks]
        # A row may own blocks that it has yet to reach, and what lies in those may be NaN.
        tables[np.arange(num_blocks) >= -(-ends // self._block_tokens)[:, None]] = self._null_block
        mask = self._offsets[: num_blocks * self._block_tokens] < torch.from_numpy(ends).unsqueeze(1)
        return DecodeGroup(
            tokens=torch.from_numpy(tokens), tables=torch.from_numpy(tables), mask=mask[:, None, None, :]
        )

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _chunk(self, row: StepRow, start: int, end: int) -> Chunk:
        num_blocks = self._blocks_of(row.end)
        return Chunk(
            start=start,
            end=end,
            table=torch.from_numpy(self._tables[row.row, :num_blocks].copy()),
            num_context=row.end,
            mask=chunk_mask(row.start, row.end, torch.device("cpu")),
        )
