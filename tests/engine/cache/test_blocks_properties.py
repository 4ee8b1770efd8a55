from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.blocks import BlockId, BlockPool
from tests.oracles.naive_cache import NaiveCache


class PoolMachine(RuleBasedStateMachine):
    """Tables are taken, share each other's blocks, are released and wished for, against lists that do the same."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks: int) -> None:
        self.reused: list[BlockId] = []
        self.pool = BlockPool(num_blocks, on_reuse=self.reused.append)
        self.naive = NaiveCache(num_blocks)
        self.tables: list[list[BlockId]] = []
        self.now_s = 1.0

    @rule(count=st.integers(0, 13), passed_s=st.sampled_from([0.0, 0.0, 1.0, 5.0]))
    def take(self, count: int, passed_s: float) -> None:
        self.reused.clear()
        self.now_s += passed_s
        taken = self.pool.try_take(count, self.now_s)
        assert taken == self.naive.take(count, self.now_s)
        assert self.reused == (taken or [])
        if taken:
            self.tables.append(taken)

    @rule(count=st.integers(1, 5))
    def take_a_run(self, count: int) -> None:
        self.reused.clear()
        free = {b for b in range(self.pool.num_blocks) if not self.naive.holders[b] and not self.naive.kept_until[b]}
        starts = [s for s in range(0, self.pool.num_blocks - count + 1, count) if free >= {*range(s, s + count)}]
        run = self.pool.try_take_run(count)
        assert run == (range(starts[-1], starts[-1] + count) if starts else None)
        assert self.reused == [*(run or ())]
        for block in map(BlockId, run or ()):
            self.naive.share(block)
        self.tables.append([*map(BlockId, run or ())])

    @rule(data=st.data())
    def share_any_blocks(self, data: st.DataObject) -> None:
        blocks = st.integers(0, self.pool.num_blocks - 1).map(BlockId)
        table = data.draw(st.lists(blocks, unique=True, max_size=4))
        for block in table:
            self.pool.share(block)
            self.naive.share(block)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keep_s=st.sampled_from([0.0, 0.0, 2.0, 7.0]))
    def release(self, data: st.DataObject, keep_s: float) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        keep_until_s = self.now_s + keep_s if keep_s else 0.0
        self.pool.release(table, keep_until_s)
        self.naive.release(table, keep_until_s)

    @invariant()
    def agrees_with_the_lists(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.naive.free)
        assert [self.pool.ref_count(BlockId(b)) for b in range(self.pool.num_blocks)] == self.naive.holders

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.release(table)
            assert self.pool.num_free == self.pool.num_blocks
            self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
