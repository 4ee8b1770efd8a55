"""Which adapter versions nobody has loaded but for a trial, such as a canary. Pure."""

from __future__ import annotations

from adapters.catalogue import Catalogue


class Trials:
    """Counts the trials that a version was loaded for, by name and number, until it is loaded for good."""

    def __init__(self) -> None:
        self._num_by_version: dict[tuple[str, int], int] = {}

    def note(self, name: str, number: int, before: Catalogue, *, is_tried: bool) -> None:
        """Note that a version was loaded; a trial does not count if the version was there before all trials of it."""
        entry = before.entries.get(name)
        if not is_tried:
            self.keep(name, number)
        elif entry is None or entry.version(number) is None or (name, number) in self._num_by_version:
            self._num_by_version[name, number] = 1 + self._num_by_version.get((name, number), 0)

    def keep(self, name: str, number: int) -> None:
        """Forget the trials of a version that is to stay, however they end."""
        self._num_by_version.pop((name, number), None)

    def fail(self, name: str, number: int) -> bool:
        """End a trial; return whether the version was there for nothing else."""
        count = self._num_by_version.pop((name, number), 0)
        if count > 1:
            self._num_by_version[name, number] = count - 1
        return count == 1
