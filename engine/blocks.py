"""Blocks of the KV cache as numbers: who holds which, which are free, and which free one is reused next.

    held by n > 0 requests                       free, least recently used first
    ref_count[b] = n                             head <-> b <-> b <-> ... <-> tail

A free block keeps its content until it is taken, so that the prefix index can revive it. Knows neither tokens nor
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class BlockPool:
    """A fixed number of blocks with reference counts and an intrusive doubly linked free list; every operation is O(1).

    Args:
        num_blocks: how many there are; ids are 0 to num_blocks - 1.
        on_reuse: told of each block that is taken from the free list, before its content may be overwritten.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[BlockId], None] = lambda _: None) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._ref_count = [0] * num_blocks
        # One extra node is the list's head and tail in one: no end needs a case of its own.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Blocks that at least one request holds."""
        return self.num_blocks - self._num_free

    def ref_count(self, block: BlockId) -> int:
        """Return how many requests hold the block."""
        return self._ref_count[block]

    def try_take(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks, least recently used first, or none at all if there are fewer."""
        if count > self._num_free:
            return None
        taken = []
        for _ in range(count):
            block = BlockId(self._next[self.num_blocks])
            self._unlink(block)
            self._ref_count[block] = 1
            self._on_reuse(block)
            taken.append(block)
        return taken

    def share(self, block: BlockId) -> None:
        """Hold a block whose content is wanted; revives it where it was free."""
        if self._ref_count[block] == 0:
            self._unlink(block)
        self._ref_count[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Let go of a request's blocks, given in the order of its table.

        The last one goes to the front of those released: a prefix is worth more than what follows it, so that its end
        is reused first.
        """
        for block in reversed(list(blocks)):
            if self._ref_count[block] <= 0:
                raise AssertionError(f"block {block} is released more often than it was taken")
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._append(block)

    def check(self) -> None:
        """Raise AssertionError unless the free list and the reference counts tell one story."""
        seen = set()
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            assert block not in seen, "the free list has a cycle"
            assert self._ref_count[block] == 0, f"block {block} is free and held"
            assert self._next[self._previous[block]] == block, "the free list is torn"
            seen.add(block)
            block = self._next[block]
        assert len(seen) == self._num_free, "the free count is wrong"
        assert len(seen) + sum(count > 0 for count in self._ref_count) == self.num_blocks, "a block is lost"

    def _unlink(self, block: BlockId) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def _append(self, block: BlockId) -> None:
        tail = self._previous[self.num_blocks]
        self._next[tail] = block
        self._previous[block] = tail
        self._next[block] = self.num_blocks
        self._previous[self.num_blocks] = block
        self._num_free += 1
