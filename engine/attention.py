"""A step's batch as attention needs it, prepared once and shared by all layers.

tokens   0 ........ D ............ D + n1 ............ D + n1 + n2
         [ D rows   )[ row of n1   )[ row of n2        )
           1 token     a chunk        a chunk

For operators without block tables, blocks are gathered and slots are masked: single-token rows of similar length are
gathered together, as each row is padded to the longest of its group; a row of several tokens is gathered separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

MAX_PADDING = 2
"""Single-token rows are gathered together while the longest has at most this many times the blocks of the shortest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows of one token each and of similar length.

    Attributes:
        tokens: [rows] int64, the index of each row's token in the batch.
        tables: [rows, blocks of the longest] int64; shorter rows are padded with the null block.
        ends: [rows] int64, one past each row's own position.
        mask: [rows, 1, 1, slots] bool, True where a slot is at or before the row's own position.
    """

    tokens: torch.Tensor
    tables: torch.Tensor
    ends: torch.Tensor
    mask: torch.Tensor

    def seen(self, window: int) -> torch.Tensor:
        """Return the mask restricted to a layer's sliding window; 0 for no window."""
        if not window:
            return self.mask
        slots = torch.arange(self.mask.shape[-1], device=self.mask.device)
        return self.mask & (slots >= self.ends[:, None, None, None] - window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A row of several tokens.

    Attributes:
        start, end: its half-open range of the batch's tokens.
        table: [blocks] int64.
        num_context: number of positions up to and including the chunk's last.
        mask: [tokens, num_context] bool, or None if the chunk starts at position 0 and a causal mask suffices.
    """

    start: int
    end: int
    table: torch.Tensor
    num_context: int
    mask: torch.Tensor | None

    def seen(self, window: int) -> torch.Tensor | None:
        """Return the mask restricted to a layer's sliding window; 0 for no window."""
        if not window or window >= self.num_context:
            return self.mask
        keys = torch.arange(self.num_context, device=self.table.device)
        own = keys[self.start - self.end :].unsqueeze(1)
        return (keys <= own) & (keys > own - window)


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Where each token's keys and values are written, and which blocks each row reads.

    Attributes:
        slots: [tokens] int64, the slot mapping: block * block_tokens + offset in the block.
        rows: [rows, 4] int64: first token in the batch, its position, number of tokens, row of `tables`; in token
            order.
        tables: [any, blocks] int64, the block table of each request; entries past its last position are undefined.
        null_block: a block that is always zero.
        num_decodes: number of leading rows that have one token each.
        window: sliding window, in positions, of the layers that read these tables; 0 for none. Entries before the
            window may name blocks that now belong to another request.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor
    block_tokens: int
    null_block: int
    num_decodes: int = 0
    window: int = 0

    @cached_property
    def gathered(self) -> tuple[tuple[DecodeGroup, ...], tuple[Chunk, ...]]:
        """Return the batch for operators that cannot read block tables; computed at the first layer that asks."""
        return _gather(self.rows, self.tables, self.block_tokens, self.null_block, self.window)


def _gather(
    rows: torch.Tensor, tables: torch.Tensor, block_tokens: int, null_block: int, window: int = 0
) -> tuple[tuple[DecodeGroup, ...], tuple[Chunk, ...]]:
    """Sort a step's rows into groups and chunks; arguments as in `AttentionBatch`."""
    singles: list[tuple[int, int, int]] = []  # (end, token, table)
    chunks: list[Chunk] = []
    for token, position, count, table in rows.tolist():
        end = position + count
        if count == 1:
            singles.append((end, token, table))
        else:
            chunks.append(
                Chunk(
                    start=token,
                    end=token + count,
                    table=_seen_of(
                        tables[table, : -(-end // block_tokens)], position, block_tokens, null_block, window
                    ),
                    num_context=end,
                    mask=chunk_mask(position, end, tables.device),
                )
            )
    groups: list[list[tuple[int, int, int]]] = []
    for single in sorted(singles):
        num_blocks = -(-single[0] // block_tokens)
        if not groups or num_blocks > MAX_PADDING * -(-groups[-1][0][0] // block_tokens):
            groups.append([])
        groups[-1].append(single)
    decodes = tuple(_decode_group(group, tables, block_tokens, null_block, window) for group in groups)
    return decodes, tuple(chunks)


def chunk_mask(start: int, end: int, device: torch.device) -> torch.Tensor | None:
    """Return which of the positions [0, end) each position of [start, end) sees; None for a plain causal mask."""
    if start == 0:
        return None
    return torch.arange(end, device=device) <= torch.arange(start, end, device=device).unsqueeze(1)


def _seen_of(table: torch.Tensor, position: int, block_tokens: int, null_block: int, window: int) -> torch.Tensor:
    """Return a table with the null block for blocks that lie before the window of positions from `position` on."""
    num_left = max(0, position - window + 1) // block_tokens if window else 0
    return torch.cat((torch.full_like(table[:num_left], null_block), table[num_left:])) if num_left else table


def _decode_group(
    singles: Sequence[tuple[int, int, int]], tables: torch.Tensor, block_tokens: int, null_block: int, window: int
) -> DecodeGroup:
    ends, tokens, rows = (torch.tensor(column, device=tables.device) for column in zip(*singles, strict=True))
    num_blocks = -(-singles[-1][0] // block_tokens)
    # A table may name blocks past the row's position or before its window; their content may be NaN.
    starts = torch.arange(num_blocks, device=tables.device) * block_tokens
    is_reached = starts < ends.unsqueeze(1)
    if window:
        is_reached &= starts + block_tokens > ends.unsqueeze(1) - window
    mask = torch.arange(num_blocks * block_tokens, device=tables.device) < ends.unsqueeze(1)
    return DecodeGroup(
        tokens=tokens,
        tables=tables[rows, :num_blocks].where(is_reached, null_block),
        ends=ends,
        mask=mask[:, None, None, :],
    )
