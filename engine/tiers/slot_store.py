"""What every tier below the device's cache can do: keep the content of blocks in numbered slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cache.prefix_index import BlockName
from engine.ports import KeptBlock


class SlotStore(Protocol):
    """Slots of one block each; `write` and `read` come from one thread each, and never of one slot at once.

    Attributes:
        num_slots: how many there are.
    """

    num_slots: int

    def contents(self) -> Sequence[KeptBlock]:
        """Return what it holds from an earlier run, the least recently written first."""
        ...

    def write(self, slot: int, name: BlockName, depth: int, content: torch.Tensor) -> None:
        """Keep bytes [block_bytes].

        Raises:
            OSError: they could not be written; the slot holds nothing.
        """
        ...

    def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
        """Return the bytes [block_bytes] of a block, valid until the slot is written; None where they are not whole."""
        ...

    def close(self) -> None:
        """Let go of what it holds on to."""
        ...
