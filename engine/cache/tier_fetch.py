"""A fetch from a tier: the blocks that it holds, and what a request finds on the device once it is done. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName
from engine.ports import BlockOrder


@dataclass(slots=True)
class TierFetch:
    """The blocks that one fetch holds until it is done: the prefix on the device, and blocks to fill after it.

    Attributes:
        names: names of the chain's leading blocks that are on the device once it is done.
        num_before: how many of them were there before.
        until_s: time from which nobody waits for it, and its blocks are released.
        num_by_tier: how many blocks it reads from each tier.
        is_given_up: its blocks are released; only its slots are still being read.
    """

    names: Sequence[BlockName]
    num_before: int
    shared: list[BlockId]
    orders: list[BlockOrder]
    until_s: float
    is_given_up: bool = False
    num_by_tier: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_by_tier = Counter(order.tier for order in self.orders)

    @property
    def farthest(self) -> int:
        """The farthest tier that it reads, behind whose other fetches it waits."""
        return max(self.num_by_tier)

    @property
    def blocks(self) -> list[BlockId]:
        """The blocks that it holds, in the order of the chain."""
        return [] if self.is_given_up else [*self.shared, *(order.block for order in self.orders)]

    def begins_on(self, names: Sequence[BlockName]) -> bool:
        """Return whether a chain has the first block that it brings, in O(1)."""
        start = self.num_before
        return start < len(names) and names[start] == self.names[start] and not self.is_given_up

    def num_brought(self, names: Sequence[BlockName], *, is_whole: bool) -> int:
        """Return how many more leading blocks of a chain it brings, in O(log n).

        Args:
            is_whole: whether the chain must have all of `names`: what a window of another chain shows is not brought.
        """
        if not self.begins_on(names):
            return 0
        start, end = self.num_before, min(len(names), len(self.names))
        # A name stands for all blocks up to its own.
        num_common = bisect_left(range(end), True, lo=start, key=lambda i: names[i] != self.names[i])
        return 0 if is_whole and num_common < len(self.names) else num_common - start
