"""A queue of groups of items whose groups take turns, item by item. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Yields the first item of the first group, whose remaining items then go behind all other groups."""

    def __init__(self) -> None:
        self._groups: deque[deque[T]] = deque()

    def add(self, group: Iterable[T]) -> None:
        """Append a group; its items keep their order."""
        items = deque(group)
        if items:
            self._groups.append(items)

    def first(self) -> T | None:
        """Return the next item, None if there is none."""
        return self._groups[0][0] if self._groups else None

    def pop(self) -> T:
        """Remove and return the next item."""
        group = self._groups.popleft()
        item = group.popleft()
        if group:
            self._groups.append(group)
        return item
