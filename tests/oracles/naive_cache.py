"""The block pool and the prefix index as lists and plain prefixes: slow, obvious, and without hashes."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveCache:
    """Blocks as a list of holders each; free ones in the order in which they are to be reused."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.content: dict[int, tuple[object, ...]] = {}

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.holders[block] = 1
            self.content.pop(block, None)
        return taken

    def share(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)

    def fill(self, block: int, prefix: tuple[object, ...]) -> None:
        """Note what a block holds, unless another block holds just that."""
        if block not in self.content and prefix not in self.content.values():
            self.content[block] = prefix

    def match(self, prefixes: Sequence[tuple[object, ...]]) -> list[int]:
        """Find the blocks that hold the longest run of the given prefixes."""
        block_by_prefix = {prefix: block for block, prefix in self.content.items()}
        found = []
        for prefix in prefixes:
            if prefix not in block_by_prefix:
                break
            found.append(block_by_prefix[prefix])
        return found
