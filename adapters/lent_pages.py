"""Pages of memory lent to adapters: which are free, and which loan could be ended.

A loan is a run of KV cache blocks, divided into pages. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class LentPage(NamedTuple):
    """One page: the loan that it belongs to, and its index there."""

    run: range
    number: int


class LentPages:
    """The pages of all loans."""

    def __init__(self) -> None:
        self._free_by_run: dict[range, list[int]] = {}
        self._count_by_run: dict[range, int] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that no adapter uses."""
        return sum(map(len, self._free_by_run.values()))

    def add(self, run: range, num_pages: int) -> None:
        """Add the pages of a loan, all free."""
        self._free_by_run[run] = list(range(num_pages))
        self._count_by_run[run] = num_pages

    def take(self, count: int) -> tuple[LentPage, ...]:
        """Take `count` pages, which must be free, from fuller loans first, so that emptier ones can end."""
        if count > self.num_free:
            raise AssertionError(f"{count} pages are taken where {self.num_free} are free")
        taken: list[LentPage] = []
        for run, free in sorted(self._free_by_run.items(), key=lambda item: len(item[1])):
            while free and len(taken) < count:
                taken.append(LentPage(run, free.pop()))
        return tuple(taken)

    def release(self, pages: Iterable[LentPage]) -> None:
        """Mark pages as free."""
        for page in pages:
            self._free_by_run[page.run].append(page.number)

    def emptiest(self, unless: set[range]) -> range | None:
        """Return the loan with the most free pages that is not in `unless`, or None if there is none."""
        runs = [run for run in self._free_by_run if run not in unless]
        return max(runs, key=lambda run: len(self._free_by_run[run]), default=None)

    def end(self, run: range) -> None:
        """Remove a loan; all its pages must be free."""
        free, count = self._free_by_run.pop(run), self._count_by_run.pop(run)
        if len(free) < count:
            raise AssertionError("a loan ends with an adapter in it")

    def check(self, held: Iterable[LentPage]) -> None:
        """Raise AssertionError unless every page is either free, once, or one of `held`."""
        free = [LentPage(run, number) for run, numbers in self._free_by_run.items() for number in numbers]
        everything = [LentPage(run, number) for run, count in self._count_by_run.items() for number in range(count)]
        assert sorted([*free, *held], key=_order) == sorted(everything, key=_order), "a page is lost or taken twice"


def _order(page: LentPage) -> tuple[int, int]:
    return page.run.start, page.number
