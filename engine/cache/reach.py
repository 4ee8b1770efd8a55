"""How far back the block tables of a request reach: which blocks its next tokens still read, and how many that takes.

    blocks   [ left behind ][ seen from `start` on ][ start .. end: this step's ][ ... ]
    window                  |<---- window ---->|

A table without a window keeps everything. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import cycle, takewhile

from engine.cache.layout import TILE_TOKENS
from engine.cache.prefix_index import BlockName


def name_in(name: BlockName, table: int) -> BlockName:
    """Return the name of a block's part in one table; unique, as no two digests differ in just one byte."""
    return BlockName(bytes((name[0] ^ table,)) + name[1:]) if table else name


class Reach:
    """Computes which blocks requests need in the tables of a cache.

    Args:
        windows: window of each table, as in `engine.cache.layout.CacheLayout`.
        step_tokens: most tokens that one request may compute in one step.
    """

    def __init__(self, windows: Sequence[int], block_tokens: int, step_tokens: int) -> None:
        self.windows = tuple(windows)
        self.block_tokens = block_tokens
        self._step_tokens = step_tokens

    @property
    def step_blocks(self) -> int:
        """How many blocks, over all tables, a step without decodes fills."""
        return self.num_blocks(self._step_tokens) * len(self.windows)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens in a table without a window."""
        return -(-num_tokens // self.block_tokens)

    def resting(self, num_tokens: int) -> int:
        """Return how many blocks, over all tables, a request of `num_tokens` tokens holds at most while it decodes."""
        return sum(self._at_most(num_tokens, window, window + TILE_TOKENS) for window in self.windows)

    def most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds, namely during prefill.

        One step is in flight, which keeps its blocks until it is done, and another one is planned.
        """
        steps = 2 * self._step_tokens
        return sum(self._at_most(num_tokens, window, window + TILE_TOKENS + steps) for window in self.windows)

    def capacity(self, num_blocks: int, longest: int) -> int:
        """Return the length, up to `longest`, of the longest request for which `num_blocks` blocks always suffice."""
        return bisect_right(range(1, longest + 1), num_blocks, key=self.most)

    def end(self, window: int, num_computed: int, num_tokens: int) -> int:
        """Return how many blocks a table needs: for all known tokens or, with a window, to the end of the next step."""
        return self.num_blocks(min(num_tokens, num_computed + self._step_tokens) if window else num_tokens)

    def num_left(self, window: int, position: int) -> int:
        """Return how many leading blocks of a table are not read by computing from `position` on."""
        if not window:
            return 0
        return max(0, position - window + 1) // TILE_TOKENS * TILE_TOKENS // self.block_tokens

    def seen(self, count: int) -> list[range]:
        """Return for each table which of the first `count` blocks are in the window of the token after them."""
        end = count * self.block_tokens
        first = (max(0, end - window + 1) // self.block_tokens if window else 0 for window in self.windows)
        return [range(start, count) for start in first]

    def longest(self, names: Sequence[BlockName], has: Callable[[BlockName], bool]) -> int:
        """Return how many leading blocks of a chain can be reused if exactly the parts that satisfy `has` are there."""
        count, num_agreeing = len(names), 0
        # Each table may shorten the result of the one before; it agrees with its own.
        for table, window in cycle(enumerate(self.windows)):
            found = self._longest(names[:count], table, window, has)
            num_agreeing = num_agreeing + 1 if found == count else 1
            count = found
            if num_agreeing == len(self.windows):
                break
        return count

    def _longest(self, names: Sequence[BlockName], table: int, window: int, has: Callable[[BlockName], bool]) -> int:
        if not window:
            parts = (name_in(name, table) for name in names) if table else names
            return sum(1 for _ in takewhile(has, parts))
        end = len(names)
        for i in range(end - 1, -1, -1):
            # The token after `end` blocks sees nothing before its window.
            if i < (end * self.block_tokens - window + 1) // self.block_tokens:
                break
            if not has(name_in(names[i], table)):
                end = i
        return end

    def _at_most(self, num_tokens: int, window: int, reach: int) -> int:
        """Bound the blocks of a table that keeps `reach` tokens, either end of which may be inside a block."""
        held = self.num_blocks(num_tokens)
        return min(held, self.num_blocks(reach) + 2) if window else held
