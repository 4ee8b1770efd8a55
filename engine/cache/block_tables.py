"""The block table of every running request: what it shares, what it takes, what it names for those who come later.

    blocks   [ shared with equal prefixes ][ its own, full and named ][ its own, being filled ]
    tokens   0 ................................. num_computed ........ num_tokens

Joins `BlockPool`, `PrefixIndex` and `CacheTiers`; knows requests, but not which of them deserves a block. Runs of
neighbouring blocks may be lent to who keeps something else in their memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from operator import attrgetter

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import BlockName, Landmarks, PrefixIndex
from engine.cache.tiers import MAX_FETCHES, MAX_SEEKS, CacheTiers
from engine.config import ResolvedConfig
from engine.ports import BlockMover
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts

SEEK_AGAIN_S = 0.25
"""To look for a long prompt takes milliseconds, which each step would take that it waits."""


class BlockTables:
    """Gives blocks to requests and takes them back; every table it fills is `LiveRequest.blocks`."""

    def __init__(self, config: ResolvedConfig, clock: Callable[[], float], mover: BlockMover | None = None) -> None:
        self._clock = clock
        self._block_tokens = config.block_tokens
        self._has_index = config.enable_prefix_cache
        self.landmarks = Landmarks(config.num_blocks)
        self._index = PrefixIndex(self.landmarks, lambda name: self.tiers.holds(name))
        self._pool = BlockPool(config.num_blocks, on_reuse=self._reuse)
        self.tiers = CacheTiers(self._pool, self._index, self.landmarks, mover)
        self._lent: list[range] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return (self._pool.num_held - self.num_lent) / self._pool.num_blocks

    @property
    def num_lent(self) -> int:
        """Blocks that are lent."""
        return sum(map(len, self._lent))

    def try_open(self, live: LiveRequest, *, spare: int) -> bool:
        """Give a request the blocks of all its known tokens, and mark as computed those that the cache holds.

        Does nothing and returns False unless `spare` more blocks stay free.
        """
        shared = self._shared(live)
        num_new = self._num_blocks_of(live.num_tokens) - len(shared)
        num_revived = sum(self._pool.ref_count(block) == 0 for block in shared)
        if num_new + num_revived + spare > self._pool.num_free:
            return False
        for block in shared:
            self._pool.share(block)
            self.tiers.use(block)
        taken = self._pool.try_take(num_new, self._clock())
        assert taken is not None, "the pool has fewer free blocks than it said"
        live.blocks = [*shared, *taken]
        live.num_computed = len(shared) * self._block_tokens
        return True

    def num_to_compute(self, live: LiveRequest) -> int:
        """Return how many tokens of a request without blocks the cache does not hold."""
        return live.num_tokens - len(self._shared(live)) * self._block_tokens

    def try_extend(self, live: LiveRequest) -> bool:
        """Lengthen a request's table to all its known tokens; False changes nothing."""
        num_new = self._num_blocks_of(live.num_tokens) - len(live.blocks)
        if num_new <= 0:
            return True
        taken = self._pool.try_take(num_new, self._clock())
        if taken is None:
            return False
        live.blocks.extend(taken)
        return True

    def extend_beyond(self, live: LiveRequest, count: int, *, spare: int) -> int:
        """Make room for tokens beyond its known ones if `spare` blocks stay free; returns for how many there is room.

        Args:
            count: tokens that are wanted.
        """
        num_new = self._num_blocks_of(live.num_tokens + count) - len(live.blocks)
        if 0 < num_new <= self._pool.num_free - spare:
            live.blocks.extend(self._pool.try_take(num_new, self._clock()) or ())
        return min(count, len(live.blocks) * self._block_tokens - live.num_tokens)

    def name(self, live: LiveRequest, start: int, end: int) -> None:
        """Take it as a fact that the cache holds the request's tokens from `start` to `end`: full blocks get names."""
        first, last = start // self._block_tokens, end // self._block_tokens
        if self._has_index and last > first:
            names = live.names_of(last, self._block_tokens)
            for i in range(first, last):
                self._index.insert(names[i], live.blocks[i], i)

    def close(self, live: LiveRequest) -> None:
        """Take a request's blocks back; those with names stay findable until they are reused."""
        num_full = 0
        if self._has_index and live.request.retention_s:
            # What is not full has no name, and is worth nothing to anybody.
            num_full = live.num_computed // self._block_tokens
        self._pool.release(live.blocks[num_full:])
        self._pool.release(live.blocks[:num_full], self._clock() + live.request.retention_s)
        self.tiers.let_go(live.blocks)
        live.blocks = []
        live.num_computed = live.num_seeks = 0
        live.next_seek_s = 0.0

    def bring_back(self, waiting: Sequence[LiveRequest], num_running: int, costs: StepCosts) -> None:
        """Begin to fetch what the tiers below hold of those who come next, where that is sooner than computing it.

        A free block for each request that runs, and for the one that waits, is left.
        """
        if not self.tiers.are_there:
            return
        now_s = self._clock()
        self.tiers.advance(now_s=now_s, is_idle=not (num_running or waiting))
        for live in nsmallest(MAX_FETCHES, waiting, key=attrgetter("rank")):
            if live.num_seeks < MAX_SEEKS and now_s >= live.next_seek_s and not self.is_coming(live):
                live.next_seek_s = now_s + SEEK_AGAIN_S
                found = self.tiers.try_fetch(
                    self._shareable_names(live),
                    spare=num_running + 1,
                    now_s=now_s,
                    worth_s=lambda num_blocks: costs.saved_s(num_running, num_blocks * self._block_tokens),
                )
                live.ticket = found
                live.num_seeks += found is not None

    def is_coming(self, live: LiveRequest) -> bool:
        """Return whether what a waiting request begins with is on its way to the device."""
        return self.tiers.is_worth_waiting_for(live.ticket, self._clock())

    def try_lend(self, count: int) -> range | None:
        """Lend a run of blocks that nobody holds, with the prefixes they had, if half of all blocks stay free."""
        if self._pool.num_free - count < self._pool.num_blocks // 2:
            return None
        run = self._pool.try_take_run(count)
        if run is not None:
            self._lent.append(run)
        return run

    def take_back(self, run: range) -> None:
        """End a loan: nobody reads or writes the run's memory any more."""
        self._lent.remove(run)
        self._pool.release(map(BlockId, run))

    def check(self, running: Sequence[LiveRequest]) -> None:
        """Raise AssertionError unless exactly the tables of `running` hold blocks, and nothing is shared wrongly."""
        self._pool.check()
        self._index.check(self._pool)
        self.tiers.check()
        holding = (*(live.blocks for live in running), *self._lent, self.tiers.held())
        holders = Counter(block for held in holding for block in held)
        for block in map(BlockId, range(self._pool.num_blocks)):
            assert self._pool.ref_count(block) == holders[block], f"block {block} is counted wrongly"
        content_by_block: dict[BlockId, object] = {}
        for live in running:
            assert live.num_computed <= len(live.blocks) * self._block_tokens, "computed beyond its blocks"
            tokens = (*live.request.prompt_ids, *live.output_ids)
            for i, block in enumerate(live.blocks):
                content = (live.request.adapter, live.request.salt, tokens[: (i + 1) * self._block_tokens])
                assert content_by_block.setdefault(block, content) == content, f"block {block} is shared wrongly"

    def _shared(self, live: LiveRequest) -> list[BlockId]:
        """Return the blocks that hold the beginning of a request."""
        return self._index.match(self._shareable_names(live))

    def _shareable_names(self, live: LiveRequest) -> list[BlockName]:
        """Return the names of the blocks that a request need not compute if it finds them."""
        if not self._has_index or live.needs_every_token:
            return []
        # The last token is always computed: its logits are what the next one is drawn from.
        return live.names_of((live.num_tokens - 1) // self._block_tokens, self._block_tokens)

    def _reuse(self, block: BlockId) -> None:
        self.tiers.overwrite(block)
        self._index.evict(block)

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
