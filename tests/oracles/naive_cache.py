"""The block pool and the prefix index as lists and plain prefixes: slow, obvious, and without hashes."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveCache:
    """Blocks as a list of holders each; free ones in the order in which they are to be reused."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = [0] * num_blocks
        self.plain = list(range(num_blocks))
        self.kept: list[int] = []
        self.kept_until = dict.fromkeys(range(num_blocks), 0.0)
        self.content: dict[int, tuple[object, ...]] = {}

    @property
    def free(self) -> list[int]:
        return self.plain + self.kept

    def take(self, count: int, now: float = 0.0) -> list[int] | None:
        if count > len(self.free):
            return None
        while self.kept and self.kept_until[self.kept[0]] <= now:
            self._give_up()
        taken = self.free[:count]
        for block in taken:
            self._remove(block)
            self.holders[block] = 1
            self.kept_until[block] = 0.0
            self.content.pop(block, None)
        return taken

    def share(self, block: int) -> None:
        self._remove(block)
        self.holders[block] += 1

    def release(self, blocks: Sequence[int], keep_until: float = 0.0) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            self.kept_until[block] = max(self.kept_until[block], keep_until)
            if self.holders[block] == 0:
                (self.kept if self.kept_until[block] else self.plain).append(block)
                if len(self.kept) > len(self.holders) // 2:
                    self._give_up()

    def _give_up(self) -> None:
        block = self.kept.pop(0)
        self.kept_until[block] = 0.0
        self.plain.append(block)

    def _remove(self, block: int) -> None:
        for blocks in (self.plain, self.kept):
            if block in blocks:
                blocks.remove(block)

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
