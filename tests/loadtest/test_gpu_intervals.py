"""Times that overlap are counted once: against a row of seconds that are ticked off one by one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.gpu.intervals import Interval, covered, union

seconds = st.integers(0, 30)
stretches = st.builds(Interval, seconds, seconds)


def ticked(intervals: list[Interval]) -> set[int]:
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(st.lists(stretches))
def test_a_union_covers_the_same_times_in_order_and_apart(intervals: list[Interval]) -> None:
    found = union(intervals)
    assert ticked(found) == ticked(intervals)
    assert all(start < end for start, end in found)
    assert all(one.end < other.start for one, other in pairwise(found))


@given(st.lists(stretches), stretches)
def test_what_is_covered_and_the_gaps_make_the_whole(intervals: list[Interval], within: Interval) -> None:
    inside = ticked([within])
    assert covered(intervals, within) == len(ticked(intervals) & inside)
    gaps = [Interval(at, at + 1) for at in inside - ticked(intervals)]
    assert covered([*intervals, *gaps], within) == len(inside)


@given(st.lists(stretches), st.randoms())
def test_neither_order_nor_repetition_matters(intervals: list[Interval], random: object) -> None:
    shuffled = intervals * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert union(shuffled) == union(intervals)
