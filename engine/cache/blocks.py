"""The blocks of the KV cache as numbers: who holds which, which are free, and which free one is reused next.

    held by n > 0 requests        free, least recently used first
    ref_count[b] = n              plain: b b b ...
                                  kept:  b b ...

A free block keeps its content until it is taken, so that the prefix index can revive it. Blocks with a retention time
are taken after all others, but at most half of all blocks are kept this way, so that retention cannot occupy the cache.
Knows neither tokens nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class BlockPool:
    """A fixed number of blocks with reference counts and two lists of free ones; O(1) for each block.

    Args:
        num_blocks: number of blocks; ids are 0 to num_blocks - 1.
        on_reuse: called with each block taken from a free list, before its content may be overwritten.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[BlockId], None] = lambda _: None) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._ref_count = [0] * num_blocks
        self._kept_until_s = [0.0] * num_blocks
        # Dictionaries for their order: a block that is shared leaves from anywhere in it.
        self._plain: OrderedDict[BlockId, None] = OrderedDict.fromkeys(map(BlockId, range(num_blocks)))
        self._kept: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._plain) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Blocks that at least one request holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: BlockId) -> int:
        """Return how many requests hold the block."""
        return self._ref_count[block]

    def try_take(self, count: int, now_s: float = 0.0) -> list[BlockId] | None:
        """Take `count` blocks, least recently used first, or return None if there are fewer free ones.

        Args:
            now_s: time on the clock of `release`; kept blocks at the head of their list that have expired become plain.
        """
        if count > self.num_free:
            return None
        while self._kept and self._kept_until_s[next(iter(self._kept))] <= now_s:
            self._give_up_oldest_kept()
        taken = []
        for _ in range(count):
            block, _ = (self._plain or self._kept).popitem(last=False)
            self._ref_count[block] = 1
            self._kept_until_s[block] = 0.0
            self._on_reuse(block)
            taken.append(block)
        return taken

    def try_take_run(self, count: int) -> range | None:
        """Take the last run of `count` free blocks, none kept, that starts at a multiple of `count`, or return None."""
        for start in range((self.num_blocks // count - 1) * count, -1, -count):
            stop = start + count
            if not any(self._ref_count[start:stop]) and not any(self._kept_until_s[start:stop]):
                for block in map(BlockId, range(start, stop)):
                    del self._plain[block]
                    self._ref_count[block] = 1
                    self._on_reuse(block)
                return range(start, stop)
        return None

    def share(self, block: BlockId) -> None:
        """Take a reference to a block for its content; revives the block if it was free."""
        if self._ref_count[block] == 0:
            del self._free(block)[block]
        self._ref_count[block] += 1

    def release(self, blocks: Iterable[BlockId], keep_until_s: float = 0.0) -> None:
        """Release a request's blocks, given in the order of its table.

        Of these blocks the last is reused first, because a prefix is worth more than what follows it.

        Args:
            keep_until_s: retention time, until which they are taken after others; 0 for none. The latest one given for
                a block counts.
        """
        for block in reversed(list(blocks)):
            if self._ref_count[block] <= 0:
                raise AssertionError(f"block {block} is released more often than it was taken")
            self._ref_count[block] -= 1
            self._kept_until_s[block] = max(self._kept_until_s[block], keep_until_s)
            if self._ref_count[block] == 0:
                self._free(block)[block] = None
                if len(self._kept) > self.num_blocks // 2:
                    self._give_up_oldest_kept()

    def check(self) -> None:
        """Raise AssertionError unless the free lists and the reference counts agree."""
        for block in (*self._plain, *self._kept):
            assert self._ref_count[block] == 0, f"block {block} is free and held"
            assert block in self._free(block), f"block {block} is in the wrong list"
        assert len(self._kept) <= self.num_blocks // 2, "more are kept than may be"
        assert self.num_free + sum(count > 0 for count in self._ref_count) == self.num_blocks, "a block is lost"

    def _free(self, block: BlockId) -> OrderedDict[BlockId, None]:
        """Return the list that a block is in while it is free."""
        return self._kept if self._kept_until_s[block] else self._plain

    def _give_up_oldest_kept(self) -> None:
        """Move the kept block that was released first to the tail of the plain list."""
        block, _ = self._kept.popitem(last=False)
        self._kept_until_s[block] = 0.0
        # At the tail: retention must not make a block be reused sooner than without it.
        self._plain[block] = None
