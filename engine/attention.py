"""A step's batch as attention needs it, prepared once and shared by all layers.

tokens   0 ........ D ............ D + n1 ............ D + n1 + n2
         [ D rows   )[ row of n1   )[ row of n2        )
           1 token     a chunk        a chunk
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from engine.gathering import GatheredAttention, gather


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
    def gathered(self) -> GatheredAttention:
        """Return the batch for operators that cannot read block tables; computed at the first layer that asks."""
        return gather(self.rows, self.tables, self.block_tokens, self.null_block, self.window)
