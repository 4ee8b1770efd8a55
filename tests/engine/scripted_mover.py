"""A stand-in for what copies blocks to tiers and back: it takes its time, loses blocks, and notices impatience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.cache.prefix_index import BlockName
from engine.ports import BlockOrder, KeptBlock

Content = dict[int, int]
"""Cells of a block by their offset."""


class ScriptedMover:
    """An `engine.ports.BlockMover` over the cells of a `ScriptedRunner`.

    Args:
        capacities: slots of each tier.
        steps: ticks that each copy takes.
        losing: every so many-th block that is read turns out to be lost; 0 for none.

    Attributes:
        hanging: tiers whose copies do not end.
    """

    def __init__(self, capacities: Sequence[int], *, steps: int = 1, losing: int = 0) -> None:
        self.capacities = capacities
        self._steps = steps
        self._losing = losing
        self._num_read = 0
        self.cells: dict[int, int] = {}
        self.block_tokens = 0
        self.slots: list[dict[int, tuple[BlockName, int, Content]]] = [{} for _ in capacities]
        self._stores: list[tuple[int, BlockOrder]] = []
        self._fetches: list[tuple[int, int, Sequence[BlockOrder]]] = []
        self._abandoned: list[BlockOrder] = []
        self._stored: list[tuple[BlockOrder, bool]] = []
        self._fetched: list[tuple[int, int]] = []
        self.num_fetches = 0
        self.block_s = 0.0
        self.hanging: set[int] = set()
        self._given_up: set[int] = set()

    def contents(self) -> list[list[KeptBlock]]:
        return [
            [KeptBlock(name, depth, slot) for slot, (name, depth, _) in sorted(slots.items())] for slots in self.slots
        ]

    def store(self, orders: Sequence[BlockOrder]) -> None:
        for order in orders:
            assert len(self._content(order.block)) == self.block_tokens, "a block is stored that is not full"
            self._stores.append((self._steps_of(order), order))

    def abandon(self, block: int) -> None:
        found = [order for _, order in self._stores if order.block == block]
        assert found, "a copy is abandoned that is not under way"
        self._abandoned += found

    def stored(self) -> list[tuple[BlockOrder, bool]]:
        done, self._stored = self._stored, []
        return done

    def fetch(self, ticket: int, orders: Sequence[BlockOrder]) -> None:
        self.num_fetches += 1
        for order in orders:
            # Half written, say, from now until it is done.
            self._clear(order.block)
            assert self.slots[order.tier][order.slot][0] == order.name, "a slot is read that holds something else"
        self._fetches.append((max(map(self._steps_of, orders)), ticket, orders))

    def fetched(self) -> list[tuple[int, int]]:
        done, self._fetched = self._fetched, []
        return done

    def give_up(self, ticket: int) -> None:
        self._given_up.add(ticket)

    def fetch_s(self, num_by_tier: Mapping[int, int]) -> float:
        return sum(num_by_tier.values()) * self.block_s

    def tick(self) -> None:
        self._stores = [(left - 1, order) for left, order in self._stores]
        self._fetches = [(left - 1, ticket, orders) for left, ticket, orders in self._fetches]
        for _, order in [store for store in self._stores if store[0] <= 0]:
            self._stored.append((order, self._write(order)))
        for _, ticket, orders in [fetch for fetch in self._fetches if fetch[0] <= 0]:
            # Of what was given up some may have been written before: it is somebody else's by now.
            self._fetched.append((ticket, len(orders) - 1 if ticket in self._given_up else self._read(orders)))
        self._stores = [store for store in self._stores if store[0] > 0]
        self._fetches = [fetch for fetch in self._fetches if fetch[0] > 0]

    def _steps_of(self, order: BlockOrder) -> int:
        return 10**9 if order.tier in self.hanging else self._steps

    def _write(self, order: BlockOrder) -> bool:
        is_abandoned = any(order is other for other in self._abandoned)
        if not is_abandoned:
            self.slots[order.tier][order.slot] = order.name, order.depth, self._content(order.block)
        return not is_abandoned

    def _read(self, orders: Sequence[BlockOrder]) -> int:
        for count, order in enumerate(orders):
            assert not self._content(order.block), "somebody writes to a block that is being filled"
            self._num_read += 1
            if self._losing and self._num_read % self._losing == 0:
                return count
            name, _, content = self.slots[order.tier][order.slot]
            assert name == order.name, "a slot was overwritten while it was read"
            start = order.block * self.block_tokens
            self.cells.update({start + offset: value for offset, value in content.items()})
        return len(orders)

    def _content(self, block: int) -> Content:
        start = block * self.block_tokens
        return {i: self.cells[start + i] for i in range(self.block_tokens) if start + i in self.cells}

    def _clear(self, block: int) -> None:
        for slot in range(block * self.block_tokens, (block + 1) * self.block_tokens):
            self.cells.pop(slot, None)
