"""Arithmetic on stretches of time: how much of one is covered by others, which may overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """From `start` up to `end`; nothing where they are equal."""

    start: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times in order, none of which touch."""
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
    """Return how much of `within` lies in any of the intervals; the rest of it are the gaps between them."""
    clipped = (Interval(max(start, within.start), min(end, within.end)) for start, end in intervals)
    return sum(end - start for start, end in union(clipped))
