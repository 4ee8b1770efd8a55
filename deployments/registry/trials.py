"""Which adapter versions nobody has loaded but for a trial, such as a canary. Blocks."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.catalogue import Catalogue
from adapters.store import AdapterStore


class Trials:
    """Counts the trials that a version was loaded for, by name and number, until it is loaded for good.

    Args:
        store: remembers which versions these are. Of those of an earlier process, which did not hear how their trials
            ended, each counts as tried once.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._num_by_version = dict.fromkeys(store.tried(), 1)

    def note(self, name: str, number: int, before: Catalogue, *, is_tried: bool) -> None:
        """Note that a version was loaded; a trial does not count if the version was there before all trials of it."""
        entry = before.entries.get(name)
        if not is_tried:
            self.keep(name, [number])
        elif (name, number) in self._num_by_version:
            self._num_by_version[name, number] += 1
        elif entry is None or entry.version(number) is None:
            self._store.set_tried(name, number, is_tried=True)
            self._num_by_version[name, number] = 1

    def keep(self, name: str, numbers: Iterable[int]) -> None:
        """Forget the trials of versions that are to stay, however they end."""
        for number in numbers:
            if self._num_by_version.pop((name, number), 0):
                self._store.set_tried(name, number, is_tried=False)

    def fail(self, name: str, number: int) -> bool:
        """End a trial; return whether the version was there for nothing else."""
        count = self._num_by_version.pop((name, number), 0)
        if count > 1:
            self._num_by_version[name, number] = count - 1
        return count == 1
