"""What attention needs to know of a step's batch, prepared once and shared by all layers.

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
    """Where each token's keys and values go, and what each row reads.

    Attributes:
        slots: [tokens] int64, block * block_tokens + offset in the block.
        rows: [rows, 4] int64: first token in the batch, its position, number of tokens, row of `tables`. In the order
            of their tokens.
        tables: [any, blocks] int64, the blocks of each request; what lies past its last position means nothing.
        null_block: a block that is always zero.
        num_decodes: so many rows at the front have one token each.
        window: how many of the last positions the layers see that read these tables; 0 for all. Of what lies before,
            tables may name blocks that are somebody else's by now.
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
        """Return what operators need that read no block tables; computed at the first layer that asks."""
        return gather(self.rows, self.tables, self.block_tokens, self.null_block, self.window)
