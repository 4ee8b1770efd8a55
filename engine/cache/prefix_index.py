"""Names of full blocks, so that a prefix is computed once and shared exactly when it may be.

    name(block i) = SHA-256("block", name(block i-1), number of tokens, tokens of block i)
    name(block -1) = SHA-256("root", "A" adapter digest, "S" salt), each value after a presence flag and its length

Two requests share a block only if everything that its content depends on is equal: all tokens up to its end, the
adapter, and the tenant's salt. The hash is cryptographic because a collision would serve one tenant another's content.

An activated adapter leaves the tokens before its start to the base model, whose names their blocks have. In the block
where it starts, name(block i-1) is replaced by SHA-256("start", name(block i-1), adapter digest, tokens before the
start in block i).
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType

from adapters.identity import AdapterDigest
from engine.cache.blocks import BlockId, BlockPool

BlockName = NewType("BlockName", bytes)


class Lineage(NamedTuple):
    """What the names of a request's blocks depend on besides its tokens.

    Attributes:
        adapter_start: position of the first token that the adapter applies to.
    """

    adapter: AdapterDigest | None
    salt: str
    adapter_start: int = 0

    def next_name(self, parent: BlockName | None, start: int, token_ids: Sequence[int]) -> BlockName:
        """Return the name of the full block at position `start`; `parent` is the one before it, None for the first."""
        num_before = self.adapter_start - start
        if parent is None:
            parent = root_name(None if self.adapter_start else self.adapter, self.salt)
        if self.adapter is not None and self.adapter_start and 0 <= num_before < len(token_ids):
            parent = _start_name(parent, self.adapter, num_before)
        return child_name(parent, token_ids)


def root_name(adapter: AdapterDigest | None, salt: str) -> BlockName:
    """Return the root name of all chains with this adapter and salt."""
    digest = hashlib.sha256(b"antiphon prefix 1 root\n")
    for tag, value in ((b"A", adapter), (b"S", salt)):
        encoded = b"" if value is None else value.encode("utf-8", "surrogatepass")
        digest.update(tag + struct.pack("<?Q", value is not None, len(encoded)) + encoded)
    return BlockName(digest.digest())


def child_name(parent: BlockName, token_ids: Sequence[int]) -> BlockName:
    """Return the name of the full block that follows `parent` and holds `token_ids`."""
    digest = hashlib.sha256(b"antiphon prefix 1 block\n" + parent)
    digest.update(struct.pack(f"<Q{len(token_ids)}q", len(token_ids), *token_ids))
    return BlockName(digest.digest())


def _start_name(parent: BlockName, adapter: AdapterDigest, num_before: int) -> BlockName:
    """Return what takes the place of `parent` for the block in which an adapter starts, behind `num_before` tokens."""
    digest = hashlib.sha256(b"antiphon prefix 1 start\n" + parent)
    digest.update(struct.pack("<Q", num_before) + adapter.encode("utf-8", "surrogatepass"))
    return BlockName(digest.digest())


ASIDE = 1 << 62
"""Chain index of parts that are never landmarks: those of a block in any table but the first."""
MAX_LANDMARKS = 4096
"""Approximate number of published names of the cache, and of the tiers below it."""


def landmark(name: BlockName) -> int:
    """Return the 64-bit form in which a name is published."""
    return int.from_bytes(name[:8], "little")


class Landmarks:
    """Every `stride_blocks`-th name of each indexed chain: an outline of the cache that is small enough to send.

        blocks     0 1 2 3 4 5 6 7 8 ...     with a stride of 4, blocks 3, 7, ... are landmarks

    From them and a prompt's names, anyone can tell to within a stride how much of the prompt is cached. Of the tiers
    below only the newest landmarks are kept, because these tiers may hold far more blocks.

    Args:
        num_blocks: blocks of the cache; the stride is the smallest power of two that is at least
            num_blocks / `MAX_LANDMARKS`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.stride_blocks = 1 << ((num_blocks - 1) // MAX_LANDMARKS).bit_length()
        self._marks: set[int] = set()
        # The landmarks that only lower tiers hold, oldest first.
        self._below: OrderedDict[int, None] = OrderedDict()

    def add(self, name: BlockName, index: int) -> None:
        """Add the `index`-th name of a chain, which the cache holds."""
        if self._is_mark(index):
            self._marks.add(landmark(name))
            self._below.pop(landmark(name), None)

    def add_below(self, name: BlockName, index: int) -> None:
        """Add the `index`-th name of a chain, which only a lower tier holds."""
        if self._is_mark(index):
            self._marks.add(landmark(name))
            self._sink(landmark(name))

    def drop(self, name: BlockName, *, is_below: bool = False) -> None:
        """Drop a name the cache no longer holds, landmark or not; with `is_below`, keep it as held by a lower tier."""
        mark = landmark(name)
        if is_below and mark in self._marks:
            self._sink(mark)
        else:
            self._marks.discard(mark)
            self._below.pop(mark, None)

    def copy(self) -> frozenset[int]:
        """Return all landmarks; any thread."""
        # A single interpreter operation on plain integers: the engine's thread cannot interrupt it.
        return frozenset(self._marks)

    def _is_mark(self, index: int) -> bool:
        return index != ASIDE and (index + 1) % self.stride_blocks == 0

    def _sink(self, mark: int) -> None:
        self._below[mark] = None
        if len(self._below) > MAX_LANDMARKS:
            self._marks.discard(self._below.popitem(last=False)[0])


class PrefixIndex:
    """Maps names to blocks, one to one.

    Args:
        is_elsewhere: returns whether a lower tier holds a name.
    """

    def __init__(self, landmarks: Landmarks, is_elsewhere: Callable[[BlockName], bool] = lambda _: False) -> None:
        self._landmarks = landmarks
        self._is_elsewhere = is_elsewhere
        self._block_by_name: dict[BlockName, BlockId] = {}
        self._name_by_block: dict[BlockId, BlockName] = {}
        self._depth_by_block: dict[BlockId, int] = {}

    def __contains__(self, name: BlockName) -> bool:
        return name in self._block_by_name

    def name_of(self, block: BlockId) -> BlockName | None:
        """Return the name of a block's content, or None."""
        return self._name_by_block.get(block)

    def depth_of(self, block: BlockId) -> int:
        """Return the `index` with which a named block was inserted."""
        return self._depth_by_block[block]

    def block_of(self, name: BlockName) -> BlockId:
        """Return the block that holds a name."""
        return self._block_by_name[name]

    def insert(self, name: BlockName, block: BlockId, index: int) -> None:
        """Index a full, computed block, the `index`-th of its chain or `ASIDE`; the first block of a name keeps it."""
        if name not in self._block_by_name:
            self._block_by_name[name] = block
            self._name_by_block[block] = name
            self._depth_by_block[block] = index
            self._landmarks.add(name, index)

    def evict(self, block: BlockId) -> None:
        """Remove a block that is about to be overwritten."""
        name = self._name_by_block.pop(block, None)
        if name is not None:
            del self._block_by_name[name], self._depth_by_block[block]
            self._landmarks.drop(name, is_below=self._is_elsewhere(name))

    def check(self, pool: BlockPool) -> None:
        """Raise AssertionError unless names and blocks are one to one and inside the pool."""
        assert {b: n for n, b in self._block_by_name.items()} == self._name_by_block, "names and blocks disagree"
        assert self._depth_by_block.keys() == self._name_by_block.keys(), "a block has a name and no depth"
        assert all(0 <= block < pool.num_blocks for block in self._name_by_block), "a block outside the pool is indexed"
