"""What an index has of a chain, where one table keeps everything."""

from collections.abc import Sequence

from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName, PrefixIndex
from engine.cache.reach import Reach


def held(index: PrefixIndex, names: Sequence[BlockName]) -> list[BlockId]:
    """Return the blocks of the longest indexed beginning of `names`."""
    count = Reach((0,), 1, 1).longest(names, index.__contains__)
    return [index.block_of(name) for name in names[:count]]
