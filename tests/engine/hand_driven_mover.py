"""A stand-in for what copies blocks to tiers and back, whose threads go on only where they are told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.ports import BlockOrder, KeptBlock
from tests.engine.scripted_mover import Content, ScriptedMover


@dataclass
class _Store:
    """Attributes: content: what was read of its block; None before."""

    order: BlockOrder
    content: Content | None = None
    is_abandoned: bool = False


@dataclass
class _Fetch:
    ticket: int
    left: deque[BlockOrder] = field(default_factory=deque)
    num_good: int = 0


class HandDrivenMover(ScriptedMover):
    """Each thread takes its orders one after the other, and each of them in steps between which anything may happen.

    What is read of a block may be half of the one and half of the other; what was read may have been given away before
    it is written; of a fetch some blocks may have been filled before it is given up.

    Attributes:
        hurries: everything is done at every tick.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        super().__init__(capacities)
        self._down: list[deque[_Store]] = [deque() for _ in capacities]
        self._up: deque[_Fetch] = deque()
        self.hurries = False

    def contents(self) -> list[list[KeptBlock]]:
        # Memory does not outlive its process: the last tier is the disk.
        return [*([] for _ in self.capacities[1:]), super().contents()[-1]]

    def store(self, orders: Sequence[BlockOrder]) -> None:
        for order in orders:
            assert len(self._content(order.block)) == self.block_tokens, "a block is stored that is not full"
            self._down[order.tier].append(_Store(order))

    def abandon(self, block: int) -> None:
        found = [store for stores in self._down for store in stores if store.order.block == block]
        done = [order for order, _ in self._stored if order.block == block]
        assert found or done, "a copy is abandoned that is not under way"
        for store in found:
            store.is_abandoned |= store.content is None

    def fetch(self, ticket: int, orders: Sequence[BlockOrder]) -> None:
        self.num_fetches += 1
        for order in orders:
            self._clear(order.block)
            assert self.slots[order.tier][order.slot][0] == order.name, "a slot is read that holds something else"
        self._up.append(_Fetch(ticket, deque(orders)))

    def tick(self) -> None:
        while self.hurries and (any(self._down) or self._up):
            for tier in range(len(self._down)):
                self.go_down(tier)
            self.go_up()

    def go_down(self, tier: int) -> None:
        """Read the next block that is to be stored in a tier, or write what was read."""
        if not self._down[tier]:
            return
        store = self._down[tier][0]
        if store.content is None:
            store.content = self._content(store.order.block)
            # Whatever lies in its slot is overwritten from now on.
            self.slots[tier].pop(store.order.slot, None)
            return
        self._down[tier].popleft()
        order, is_good = store.order, not store.is_abandoned
        assert not is_good or len(store.content) == self.block_tokens, "what is half somebody else's is written"
        if is_good:
            self.slots[tier][order.slot] = order.name, order.depth, store.content
        self._stored.append((order, is_good))

    def go_up(self, *, is_lost: bool = False) -> None:
        """Fill one block of the oldest fetch, or end it.

        Args:
            is_lost: it cannot be read.
        """
        if not self._up:
            return
        fetch = self._up[0]
        if not fetch.left or fetch.ticket in self._given_up or is_lost:
            self._up.popleft()
            self._fetched.append((fetch.ticket, fetch.num_good))
            return
        order = fetch.left.popleft()
        assert not self._content(order.block), "somebody writes to a block that is being filled"
        name, _, content = self.slots[order.tier][order.slot]
        assert name == order.name, "a slot was overwritten while it was read"
        start = order.block * self.block_tokens
        self.cells.update({start + offset: value for offset, value in content.items()})
        fetch.num_good += 1

    def next_life(self) -> HandDrivenMover:
        """Return what a process finds that comes after this one's sudden end."""
        after = HandDrivenMover(self.capacities)
        after.slots[-1] = dict(self.slots[-1])
        return after
