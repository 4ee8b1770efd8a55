"""Interval arithmetic: how much of one interval is covered by others, which may overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """The half-open interval [start, end); empty if they are equal."""

    start: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as sorted intervals that neither overlap nor touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Interval(start, end))
    return found


def covered(intervals: Iterable[Interval], within: Interval) -> float:
    """Return the length of `within` that is covered by any of the intervals."""
    clipped = (Interval(max(start, within.start), min(end, within.end)) for start, end in intervals)
    return sum(end - start for start, end in union(clipped))
