"""What attention needs to know of a step's batch, prepared once and shared by all layers.

tokens   0 ........ D ............ D + n1 ............ D + n1 + n2
         [ D rows   )[ row of n1   )[ row of n2        )
           1 token     a chunk        a chunk
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows of one token each and of like length, gathered side by side.

    Attributes:
        tokens: [rows] int64, the index of each row's token in the batch.
        tables: [rows, blocks of the longest], int64; shorter rows end in the null block.
        mask: [rows, 1, 1, slots] bool, True where a slot is at or before the row's own position.
    """

    tokens: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A row of several tokens.

    Attributes:
        start, end: its half-open range of the batch's tokens.
        table: [blocks] int64.
        num_context: positions up to and including the chunk's last.
        mask: [tokens, num_context] bool, or None where the chunk begins at position 0 and plain causality holds.
    """

    start: int
    end: int
    table: torch.Tensor
    num_context: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where each token's keys and values go, and what each row reads.

    Attributes:
        slots: [tokens] int64, block * block_tokens + offset in the block.
    """

    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def chunk_mask(start: int, end: int, device: torch.device) -> torch.Tensor | None:
    """Return which of the positions [0, end) each position of [start, end) sees; None for plain causality."""
    if start == 0:
        return None
    return torch.arange(end, device=device) <= torch.arange(start, end, device=device).unsqueeze(1)
