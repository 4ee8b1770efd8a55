from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockId, BlockPool
from tests.oracles.naive_cache import NaiveCache


class PoolMachine(RuleBasedStateMachine):
    """Tables are taken, share each other's blocks, and are released, against lists that do the same."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks: int) -> None:
        self.reused: list[BlockId] = []
        self.pool = BlockPool(num_blocks, on_reuse=self.reused.append)
        self.naive = NaiveCache(num_blocks)
        self.tables: list[list[BlockId]] = []

    @rule(count=st.integers(0, 13))
    def take(self, count: int) -> None:
        self.reused.clear()
        taken = self.pool.try_take(count)
        assert taken == self.naive.take(count)
        assert self.reused == (taken or [])
        if taken:
            self.tables.append(taken)

    @rule(data=st.data())
    def share_any_blocks(self, data: st.DataObject) -> None:
        blocks = st.integers(0, self.pool.num_blocks - 1).map(BlockId)
        table = data.draw(st.lists(blocks, unique=True, max_size=4))
        for block in table:
            self.pool.share(block)
            self.naive.share(block)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.naive.release(table)

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
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
