"""The block tables of every running request: blocks it shares, blocks it owns, and block names for later requests.

    blocks   [ shared with equal prefixes ][ its own, full and named ][ its own, being filled ]
    tokens   0 ................................. num_computed ........ num_tokens

Layers with a sliding window have tables of their own (`engine.cache.layout`): blocks before the window are released and
replaced by the null block.

Combines `BlockPool`, `PrefixIndex`, `CacheTiers` and, if layers keep states, `StateMarks`. It knows requests, but not
which of them deserves a block. Runs of adjacent blocks may be lent, so that other data can use their memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import ASIDE, BlockName, Landmarks, PrefixIndex
from engine.cache.reach import name_in
from engine.cache.tiers import MAX_FETCHES, MAX_SEEKS, CacheTiers
from engine.config import ResolvedConfig
from engine.ports import BlockMover
from engine.request import RequestId
from engine.scheduling.live_request import BY_RANK, LiveRequest
from engine.scheduling.state_marks import StateMarks
from engine.scheduling.step_costs import StepCosts
from engine.step import Snapshot, StepRow

SEEK_AGAIN_S, SEEK_AGAIN_BLOCK_S = 0.25, 1e-4
"""Looking up a long prompt takes milliseconds, which would otherwise be added to each step while it waits. The second
is for each of its blocks, fifty times what its lookup takes, or more."""
LONG_BLOCKS, LOOK_AGAIN_BLOCK_S = 256, 1e-5
"""The same for a prompt that found no room, if so many of its blocks are cached: the time for each of them is some
twenty times that of its lookup."""


class _Opening(NamedTuple):
    """The block tables of a request to be admitted: what it shares, and what it takes of the free blocks.

    Attributes:
        num_shared: leading blocks that it need not compute.
        tables: block tables of these, with the null block before a window.
        shared: the same blocks in one list.
        lacking: how many new blocks each table needs.
        num_taken: free blocks that it takes: new ones, and shared ones that nobody holds.
    """

    num_shared: int
    tables: list[list[BlockId]]
    shared: list[BlockId]
    lacking: list[int]
    num_taken: int


class BlockTables:
    """Gives blocks to requests and takes them back, by way of `LiveRequest.tables`."""

    def __init__(self, config: ResolvedConfig, clock: Callable[[], float], mover: BlockMover | None = None) -> None:
        self._clock = clock
        self._block_tokens = config.block_tokens
        self._reach = config.reach
        self._tables_by_window: dict[int, list[int]] = {}
        for table, window in enumerate(config.windows):
            if window:
                self._tables_by_window.setdefault(window, []).append(table)
        self._null = BlockId(config.num_blocks)
        self._has_index = config.enable_prefix_cache
        self.landmarks = Landmarks(config.num_blocks // len(config.windows))
        self._index = PrefixIndex(self.landmarks, lambda name: self.tiers.holds(name))
        self._pool = BlockPool(config.num_blocks, on_reuse=self._reuse)
        self.tiers = CacheTiers(self._pool, self._index, self.landmarks, self._reach, mover)
        self._states = StateMarks(config) if config.num_snapshots else None
        self._lent: list[range] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that are held but not lent, 0 to 1."""
        return (self._pool.num_held - self.num_lent) / self._pool.num_blocks

    @property
    def num_lent(self) -> int:
        """Number of lent blocks."""
        return sum(map(len, self._lent))

    def try_open(self, live: LiveRequest, *, spare: int) -> bool:
        """Give a request blocks as `try_extend` does, shared ones for cached tokens, which count as computed.

        Does nothing and returns False unless `spare` more blocks per table stay free.
        """
        names = self.shareable(live)
        opening = self._opening(live, names)
        if opening.num_taken + spare * len(opening.tables) > self._pool.num_free:
            if len(opening.shared) >= LONG_BLOCKS:
                live.next_open_s = self._clock() + len(opening.shared) * LOOK_AGAIN_BLOCK_S
            return False
        for block in opening.shared:
            self._pool.share(block)
            self.tiers.use(block)
        is_done = self._try_lengthen(opening.tables, opening.lacking)
        assert is_done, "the pool has fewer free blocks than it said"
        live.tables = opening.tables
        live.num_computed = live.num_settled = opening.num_shared * self._block_tokens
        if self._states is not None:
            longest = self._reach.longest(names, self._index.__contains__)
            self._states.open(live, names[: opening.num_shared], longest)
        return True

    def _opening(self, live: LiveRequest, names: Sequence[BlockName]) -> _Opening:
        num_shared = self.num_found(names)
        tables: list[list[BlockId]] = []
        for table, seen in enumerate(self._reach.seen(num_shared)):
            found = [self._index.block_of(name_in(names[i], table)) for i in seen]
            tables.append([self._null] * seen.start + found)
        shared = [block for table in tables for block in table if block != self._null]
        lacking = self._lacking(tables, num_shared * self._block_tokens, live.num_tokens)
        num_revived = sum(self._pool.ref_count(block) == 0 for block in shared)
        return _Opening(num_shared, tables, shared, lacking, num_taken=sum(lacking) + num_revived)

    def found_no_room(self, live: LiveRequest) -> bool:
        """Return whether `try_open` failed for a request, and too recently to look up its prefix again."""
        return self._clock() < live.next_open_s

    def num_to_compute(self, live: LiveRequest) -> int:
        """Return how many tokens of a request without blocks are not in the cache; all if it `found_no_room`."""
        if self.found_no_room(live):
            return live.num_tokens
        num_shared = self.num_found(self.shareable(live))
        return live.num_tokens - num_shared * self._block_tokens

    def num_lacking(self, live: LiveRequest) -> int:
        """Return what `num_to_compute` does, or did a short while ago."""
        if self.found_no_room(live):
            return live.num_tokens
        now_s = self._clock()
        if now_s >= live.next_count_s:
            live.num_lacking = self.num_to_compute(live)
            live.next_count_s = now_s + len(live.names) * SEEK_AGAIN_BLOCK_S
        return live.num_lacking

    def shareable(self, live: LiveRequest) -> list[BlockName]:
        """Return the names of the blocks that a request need not compute if they are cached."""
        if not self._has_index or live.needs_every_token:
            return []
        # The last token is always computed: the next one is drawn from its logits.
        return live.names_of((live.num_tokens - 1) // self._block_tokens, self._block_tokens)

    def try_extend(self, live: LiveRequest) -> bool:
        """Lengthen a request's tables to all known tokens, windowed ones to the next step's; False changes nothing."""
        # The common case, checked for every request in every step. Windowed tables come last and are the shortest.
        if len(live.tables[-1]) * self._block_tokens >= live.num_tokens:
            return True
        return self._try_lengthen(live.tables, self._lacking(live.tables, live.num_computed, live.num_tokens))

    def extend_beyond(self, live: LiveRequest, count: int, *, spare: int) -> int:
        """Make room for tokens beyond the known ones if `spare` blocks per table stay free.

        Args:
            count: wanted number of such tokens.

        Returns:
            How many of them fit.
        """
        lacking = self._lacking(live.tables, live.num_computed, live.num_tokens + count)
        if sum(lacking) <= self._pool.num_free - spare * len(lacking):
            self._try_lengthen(live.tables, lacking)
        return min(count, len(live.tables[-1]) * self._block_tokens - live.num_tokens)

    def settle(self, live: LiveRequest, start: int, end: int, snapshots: Sequence[Snapshot] = ()) -> None:
        """Record that the cache now holds the request's tokens from `start` to `end` and the given states.

        Full blocks get names, and blocks that no later step of the request reads are released.
        """
        live.num_settled = end
        first, last = start // self._block_tokens, end // self._block_tokens
        if self._has_index and last > first:
            names = live.names_of(last, self._block_tokens)
            for table, blocks in enumerate(live.tables):
                for i in range(first, last):
                    self._index.insert(name_in(names[i], table), blocks[i], ASIDE if table else i)
        if snapshots and self._states is not None:
            self._states.settle(live, snapshots)
        for window, tables in self._tables_by_window.items():
            num_left = self._reach.num_left(window, end)
            if num_left and live.tables[tables[0]][num_left - 1] != self._null:
                for table in tables:
                    self._leave_behind(live.tables[table], num_left)

    def with_states(
        self, rows: tuple[StepRow, ...], live_by_id: Mapping[RequestId, LiveRequest]
    ) -> tuple[StepRow, ...]:
        """Return a step's rows with the states to resume from and the snapshots to write, if layers have states."""
        return rows if self._states is None else self._states.take(rows, live_by_id)

    def drop_unsettled(self, rows: Sequence[StepRow]) -> None:
        """Free the snapshots of a finished step that belong to failed or already ended requests."""
        if self._states is not None:
            self._states.drop_unsettled(rows)

    def close(self, live: LiveRequest, *, is_sound: bool = True) -> None:
        """Take a request's blocks back; named ones stay findable until they are reused, unless it was not sound."""
        if not is_sound:
            self._forget(live)
        num_full = 0
        if is_sound and self._has_index and live.request.retention_s:
            # A partial block has no name, so no other request could use it.
            num_full = live.num_computed // self._block_tokens
        for blocks in live.tables:
            num_left = blocks.count(self._null)
            self._pool.release(blocks[max(num_left, num_full) :])
            self._pool.release(blocks[num_left:num_full], self._clock() + live.request.retention_s)
            self.tiers.let_go(blocks[num_left:])
        live.tables = []
        live.num_computed = live.num_settled = live.num_seeks = 0

    def bring_back(self, waiting: Sequence[LiveRequest], num_running: int, costs: StepCosts) -> None:
        """Advance the tiers, and fetch prefixes of the next waiting requests from them where that beats computing them.

        Whoever else waits and begins with them waits for their fetch. A fetch leaves free what the requests before it
        by rank will take, which includes prefixes fetched for them, and one block per table for each running request
        and for the waiting one.
        """
        if not self.tiers.are_there:
            return
        now_s = self._clock()
        self.tiers.advance(now_s=now_s, is_idle=not (num_running or waiting))

        self._end_waits(waiting)

        def worth_s(num_blocks: int) -> float:
            return costs.saved_s(num_running, num_blocks * self._block_tokens)

        def await_fetch(live: LiveRequest, names: Sequence[BlockName], ticket: int | None) -> None:
            live.ticket = ticket
            if ticket is not None:
                live.num_seeks += 1
                # No longer than computing what it brings would take, which may be little.
                live.await_until_s = now_s + self.tiers.patience_s(ticket, names, worth_s)

        spare, unread = (num_running + 1) * len(self._reach.windows), list[LiveRequest]()
        for live in nsmallest(MAX_FETCHES, waiting, key=BY_RANK):
            if self._may_seek(live) and now_s >= live.next_seek_s:
                names = self.shareable(live)
                live.next_seek_s = now_s + max(SEEK_AGAIN_S, len(names) * SEEK_AGAIN_BLOCK_S)
                # Only now, and not in each step: of each it is a lookup.
                spare += sum(map(self._num_to_take, unread))
                unread.clear()
                await_fetch(live, names, self.tiers.try_fetch(names, spare=spare, now_s=now_s, worth_s=worth_s))
            unread.append(live)
        for live in waiting if self.tiers.are_fetching else ():
            # Of hundreds, most have nothing of what is fetched; a copy of the names of each would take milliseconds.
            if self._may_seek(live) and self.tiers.may_bring(live.names):
                names = self.shareable(live)
                await_fetch(live, names, self.tiers.try_join(names, worth_s))

    def _end_waits(self, waiting: Sequence[LiveRequest]) -> None:
        ended = [live for live in waiting if live.ticket is not None and not self.is_coming(live)]
        # Whatever has come of a fetch, forecasts are to count on what is found now; of hundreds, those that are next.
        for live in nsmallest(MAX_FETCHES, ended, key=BY_RANK):
            if not self.found_no_room(live):
                live.num_own = self.num_to_compute(live)
        for live in ended:
            if self.tiers.is_worth_waiting_for(live.ticket):
                live.num_seeks = MAX_SEEKS  # It would only wait again.
            live.ticket = None

    def _may_seek(self, live: LiveRequest) -> bool:
        return live.num_seeks < MAX_SEEKS and not self.is_coming(live)

    def _num_to_take(self, live: LiveRequest) -> int:
        """Return how many free blocks a waiting request needs; at most, while it awaits a fetch or `found_no_room`."""
        num_tables = len(self._reach.windows)
        if self.is_coming(live) or self.found_no_room(live):
            num_taken = sum(self._lacking([()] * num_tables, 0, live.num_tokens)) - self.tiers.num_held(live.ticket)
        else:
            num_taken = self._opening(live, self.shareable(live)).num_taken
        return max(0, num_taken) + num_tables

    def is_coming(self, live: LiveRequest) -> bool:
        """Return whether a waiting request waits for a fetch of its prefix."""
        return self._clock() < live.await_until_s and self.tiers.is_worth_waiting_for(live.ticket)

    def try_lend(self, count: int) -> range | None:
        """Lend a run of free blocks, evicting the prefixes in them, if half of all blocks stay free; else None."""
        if self._pool.num_free - count < self._pool.num_blocks // 2:
            return None
        run = self._pool.try_take_run(count)
        if run is not None:
            self._lent.append(run)
        return run

    def take_back(self, run: range) -> None:
        """End a loan; the borrower must no longer read or write the run's memory."""
        self._lent.remove(run)
        self._pool.release(map(BlockId, run))

    def check(self, running: Sequence[LiveRequest]) -> None:
        """Raise AssertionError unless only `running`, loans and fetches hold blocks, and nothing is shared wrongly."""
        self._pool.check()
        self._index.check(self._pool)
        self.tiers.check()
        if self._states is not None:
            self._states.snapshots.check(self._index.__contains__)
        tables = [blocks for live in running for blocks in live.tables]
        holding = (*tables, *self._lent, self.tiers.held())
        holders = Counter(block for held in holding for block in held if block != self._null)
        for block in map(BlockId, range(self._pool.num_blocks)):
            assert self._pool.ref_count(block) == holders[block], f"block {block} is counted wrongly"
        content_by_block: dict[BlockId, object] = {}
        for live in running:
            tokens = (*live.request.prompt_ids, *live.output_ids)
            for table, blocks in enumerate(live.tables):
                assert live.num_computed <= len(blocks) * self._block_tokens, "computed beyond its blocks"
                num_left = blocks.count(self._null)
                assert self._null not in blocks[num_left:], "a block inside of a table is left behind"
                for i, block in enumerate(blocks[num_left:], num_left):
                    end = (i + 1) * self._block_tokens
                    starts = live.request.adapter is not None and live.request.adapter_start < end
                    applied = (live.request.adapter, live.request.adapter_start) if starts else None
                    content = (table, applied, live.request.salt, tokens[:end])
                    assert content_by_block.setdefault(block, content) == content, f"block {block} is shared wrongly"

    def _lacking(self, tables: Sequence[Sequence[BlockId]], num_computed: int, num_tokens: int) -> list[int]:
        """Return how many blocks each table of a request still needs for its next step."""
        return [
            max(0, self._reach.end(window, num_computed, num_tokens) - len(blocks))
            for blocks, window in zip(tables, self._reach.windows, strict=True)
        ]

    def _try_lengthen(self, tables: Sequence[list[BlockId]], counts: Sequence[int]) -> bool:
        """Append `counts[i]` new blocks to each table i; False changes nothing."""
        taken = self._pool.try_take(sum(counts), self._clock())
        if taken is None:
            return False
        rest = iter(taken)
        for blocks, count in zip(tables, counts, strict=True):
            blocks.extend(islice(rest, count))
        return True

    def _leave_behind(self, blocks: list[BlockId], count: int) -> None:
        """Release the first `count` blocks of a table that are not the null block yet."""
        start = count
        while start and blocks[start - 1] != self._null:
            start -= 1
        left = blocks[start:count]
        blocks[start:count] = [self._null] * len(left)
        self._pool.release(left)
        self.tiers.let_go(left, are_behind=True)

    def holds(self, name: BlockName) -> bool:
        """Return whether the cache holds a block."""
        return name in self._index

    def num_found(self, names: Sequence[BlockName]) -> int:
        """Return how many leading blocks of a chain a request can reuse; any thread."""

        def reached(chain: Sequence[BlockName]) -> int:
            return self._reach.longest(chain, self._index.__contains__)

        return reached(names) if self._states is None else self._states.snapshots.longest(names, reached)

    def num_had(self, names: Sequence[BlockName], costs: StepCosts) -> int:
        """Return how many leading blocks of a chain need not be computed, by `CacheTiers.num_had`; any thread."""
        if not self.tiers.are_there:
            return self.num_found(names)
        return self.tiers.num_had(names, lambda num_blocks: costs.saved_s(1, num_blocks * self._block_tokens))

    def _forget(self, live: LiveRequest) -> None:
        """Take the names of all that a failed request has computed or found: any of it may be why it has failed.

        A copy to or from a tier that is about to end may bring a block back, until the next request fails by it.
        """
        names = live.names_of(live.num_settled // self._block_tokens, self._block_tokens) if self._has_index else []
        for table in range(len(self._reach.windows)):
            for part in (name_in(name, table) for name in names):
                self.tiers.forget(part)
                if part in self._index:
                    self._reuse(self._index.block_of(part))

    def _reuse(self, block: BlockId) -> None:
        self.tiers.overwrite(block)
        name = self._index.name_of(block)
        self._index.evict(block)
        if self._states is not None and name is not None:
            self._states.snapshots.forget(name)
