from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapters.identity import AdapterDigest
from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import BlockName, Landmarks, PrefixIndex, child_name, root_name
from tests.engine.cache.lookup import held
from tests.oracles.naive_cache import NaiveCache

Key = tuple[AdapterDigest | None, str]
keys = st.tuples(st.sampled_from([None, AdapterDigest("a"), AdapterDigest("")]), st.sampled_from(["", "a", "b"]))
block_tokens = st.tuples(st.integers(0, 1), st.integers(0, 1))
prompts = st.lists(block_tokens, min_size=1, max_size=4)


def names_of(key: Key, blocks: list[tuple[int, int]]) -> list[BlockName]:
    names, parent = [], root_name(*key)
    for tokens in blocks:
        parent = child_name(parent, tokens)
        names.append(parent)
    return names


def prefixes_of(key: Key, blocks: list[tuple[int, int]]) -> list[tuple[object, ...]]:
    return [(key, *blocks[: i + 1]) for i in range(len(blocks))]


class IndexMachine(RuleBasedStateMachine):
    """Prompts come and go through a small pool, against an index that compares whole prefixes instead of hashes."""

    @initialize(num_blocks=st.integers(4, 8))
    def build(self, num_blocks: int) -> None:
        self.index = PrefixIndex(Landmarks(8))
        self.pool = BlockPool(num_blocks, on_reuse=self.index.evict)
        self.naive = NaiveCache(num_blocks)

    @rule(key=keys, blocks=prompts)
    def serve_a_prompt(self, key: Key, blocks: list[tuple[int, int]]) -> None:
        names, prefixes = names_of(key, blocks), prefixes_of(key, blocks)
        shared = held(self.index, names)
        assert shared == self.naive.match(prefixes)
        for block in shared:
            self.pool.share(block)
            self.naive.share(block)
        taken = self.pool.try_take(len(blocks) - len(shared))
        assert taken == self.naive.take(len(blocks) - len(shared))
        table = [*shared, *(taken or [])]
        for name, prefix, block in zip(names, prefixes, table, strict=False):
            self.index.insert(name, block, 0)
            self.naive.fill(block, prefix)
        self.pool.release(table)
        self.naive.release(table)

    @rule(block=st.integers(0, 3).map(BlockId))
    def evict(self, block: BlockId) -> None:
        self.index.evict(block)
        self.naive.content.pop(block, None)

    @invariant()
    def is_one_to_one(self) -> None:
        if hasattr(self, "index"):
            self.index.check(self.pool)
            assert len(self.index._block_by_name) == len(self.naive.content)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

any_keys = st.tuples(st.none() | st.text(max_size=5).map(AdapterDigest), st.text(max_size=5))
any_blocks = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple), max_size=3)


@given(any_keys, any_blocks, any_keys, any_blocks)
@settings(max_examples=200, deadline=None)
def test_names_are_equal_exactly_where_everything_before_is(
    key: Key, blocks: list[tuple[int, ...]], other_key: Key, other_blocks: list[tuple[int, ...]]
) -> None:
    def name(of: Key, chain: list[tuple[int, ...]]) -> BlockName:
        parent = root_name(*of)
        for tokens in chain:
            parent = child_name(parent, tokens)
        return parent

    assert (name(key, blocks) == name(other_key, other_blocks)) == ((key, blocks) == (other_key, other_blocks))
