"""A tier in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cache.prefix_index import BlockName
from engine.ports import KeptBlock

PIECE_BYTES = 1 << 30
"""Memory is allocated in pieces of this size: torch page-locks the next power of two of each."""


class HostSlots:
    """Slots of one block each in page-locked memory, from which a GPU copies asynchronously.

    Args:
        is_pinned: False if no GPU reads it.
    """

    def __init__(self, num_slots: int, block_bytes: int, *, is_pinned: bool) -> None:
        self.num_slots = num_slots
        self._per_piece = max(1, PIECE_BYTES // block_bytes)
        self._pieces = [
            torch.empty(min(self._per_piece, num_slots - start), block_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for start in range(0, num_slots, self._per_piece)
        ]

    def contents(self) -> Sequence[KeptBlock]:
        """Return nothing: memory does not outlive its process."""
        return ()

    def write(self, slot: int, name: BlockName, depth: int, content: torch.Tensor) -> None:
        """Copy a block's content, bytes [block_bytes], into the slot."""
        self._slot(slot).copy_(content)

    def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
        """Return the slot itself, bytes [block_bytes], not a copy: it is valid until the slot is written."""
        return self._slot(slot)

    def close(self) -> None:
        """Nothing to do."""

    def _slot(self, slot: int) -> torch.Tensor:
        return self._pieces[slot // self._per_piece][slot % self._per_piece]
