"""Places of states: which is where, found again, given up; against the same as a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.prefix_index import BlockName
from engine.cache.snapshots import Snapshots

NAMES = [BlockName(bytes((number,))) for number in range(8)]


class SnapshotsMachine(RuleBasedStateMachine):
    """Beside it a list of (name, place), least recently used first."""

    @initialize(count=st.integers(1, 4))
    def build(self, count: int) -> None:
        self.snapshots, self.count = Snapshots(count), count
        self.kept: list[tuple[BlockName, int]] = []
        self.written: list[int] = []

    @rule()
    def take(self) -> None:
        place = self.snapshots.try_take()
        if len(self.written) == self.count:
            assert place is None
            return
        assert place is not None
        assert place not in self.written
        if len(self.kept) + len(self.written) == self.count:
            assert place == self.kept.pop(0)[1], "somebody asked for it later than for another one"
        self.written.append(place)

    @precondition(lambda self: self.written)
    @rule(name=st.sampled_from(NAMES))
    def settle(self, name: BlockName) -> None:
        place = self.written.pop(0)
        known = dict(self.kept)
        assert self.snapshots.settle(place, name) == (name not in known)
        self.kept = [pair for pair in self.kept if pair[0] != name] + [(name, known.get(name, place))]

    @precondition(lambda self: self.written)
    @rule()
    def give_back(self) -> None:
        """What is kept by then is not lost by it."""
        self.snapshots.give_back([self.written.pop(), *(place for _, place in self.kept)])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.kept))
        assert self.snapshots.use(pair[0]) == pair[1]
        self.kept.remove(pair)
        self.kept.append(pair)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: BlockName) -> None:
        self.snapshots.forget(name)
        self.kept = [pair for pair in self.kept if pair[0] != name]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "snapshots"):
            self.snapshots.check(lambda name: name in NAMES)
            assert [name for name in NAMES if name in self.snapshots] == sorted(dict(self.kept))
            assert sorted(self.snapshots._written) == sorted(self.written)


TestSnapshotsProperties = SnapshotsMachine.TestCase
TestSnapshotsProperties.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("there", "kept", "found"),
    [
        ({1, 2, 3, 4, 5, 6}, {6}, 6),
        ({1, 2, 3, 4, 5}, {6}, 0),
        ({1, 2, 3, 4, 5}, {2, 4, 6}, 4),
        ({2, 4, 5}, {2, 3, 4, 6}, 4),
        ({2, 5}, {2, 3, 4}, 2),
        ({1, 3, 5}, {2, 4}, 0),
        (set(), {1}, 0),
    ],
)
def test_one_goes_on_where_there_are_both_blocks_and_a_state(there: set[int], kept: set[int], found: int) -> None:
    """Where windows are, one may go on behind four blocks and not behind three of them."""
    snapshots = Snapshots(8)
    for count in kept:
        place = snapshots.try_take()
        assert place is not None
        snapshots.settle(place, NAMES[count - 1])
    reached = snapshots.longest(
        NAMES[:6], lambda names: max((count for count in there if count <= len(names)), default=0)
    )
    assert reached == found


def test_a_state_whose_block_has_gone_is_a_fault() -> None:
    snapshots = Snapshots(1)
    place = snapshots.try_take()
    assert place is not None
    snapshots.settle(place, NAMES[0])
    snapshots.check(lambda name: True)
    with pytest.raises(AssertionError, match="whose block has gone"):
        snapshots.check(lambda name: False)
