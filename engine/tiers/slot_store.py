"""The interface of a tier below the device's cache: it keeps the content of blocks in numbered slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cache.prefix_index import BlockName
from engine.ports import KeptBlock


class SlotStore(Protocol):
    """Slots of one block each. `write` and `read` are each called on one thread, never on the same slot at once.

    Attributes:
        num_slots: number of slots.
    """

    num_slots: int

    def contents(self) -> Sequence[KeptBlock]:
        """Return what the slots hold from an earlier run, the least recently written first."""
        ...

    def write(self, slot: int, name: BlockName, depth: int, content: torch.Tensor) -> None:
        """Store a block's content, bytes [block_bytes].

        Raises:
            OSError: they could not be written; the slot holds nothing.
        """
        ...

    def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
        """Return the bytes [block_bytes] of a block, valid until the slot is written; None if they are not intact."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...
