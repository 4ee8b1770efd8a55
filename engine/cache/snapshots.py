"""States kept at the ends of some blocks, as numbers: which is where, and which is given up next.

    prefix   [ block ][ block ][ block ][ block ][ block ]
    state                     |^                |^            each has the name of the block that it stands behind

Of layers that keep a state instead of keys a prefix is found as far as there are both its blocks and a state at its
end. Knows neither tokens nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from engine.cache.prefix_index import BlockName


class Snapshots:
    """A fixed number of places for states: each is free, being written by a step under way, or has a name.

    The one that nobody has asked for longest is given up first.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._place_by_name: OrderedDict[BlockName, int] = OrderedDict()
        self._free: list[int] = [*range(num_places)]
        self._written: set[int] = set()

    @property
    def num_written(self) -> int:
        """Places that steps under way write."""
        return len(self._written)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._place_by_name

    def longest(self, names: Sequence[BlockName], reached: Callable[[Sequence[BlockName]], int]) -> int:
        """Return behind how many leading blocks of a chain one can go on.

        Args:
            reached: tells it of what blocks there are.
        """
        count = reached(names)
        while count:
            while count and names[count - 1] not in self._place_by_name:
                count -= 1
            # Where windows are, less may be there behind fewer blocks.
            there = reached(names[:count])
            if there == count:
                break
            count = there
        return count

    def use(self, name: BlockName) -> int:
        """Return where a state is, which somebody asks for."""
        self._place_by_name.move_to_end(name)
        return self._place_by_name[name]

    def try_take(self) -> int | None:
        """Take a place to be written, a free one or that of the state that is given up; None if all are being written.

        From now on nobody finds what was there. Steps are computed in order: one before may read it still.
        """
        if not self._free and self._place_by_name:
            self.forget(next(iter(self._place_by_name)))
        if not self._free:
            return None
        place = self._free.pop()
        self._written.add(place)
        return place

    def settle(self, place: int, name: BlockName) -> bool:
        """Name what has been written; False, and the place is free again, where another one has that state."""
        self._written.remove(place)
        if name in self._place_by_name:
            self._free.append(place)
            self._place_by_name.move_to_end(name)
            return False
        self._place_by_name[name] = place
        return True

    def give_back(self, places: Collection[int]) -> None:
        """Free those places that are being written still: whoever took them has ended, or failed."""
        for place in self._written.intersection(places):
            self._written.remove(place)
            self._free.append(place)

    def forget(self, name: BlockName) -> None:
        """Free the place of a state that leads nowhere any more; one that is not kept is ignored."""
        place = self._place_by_name.pop(name, None)
        if place is not None:
            self._free.append(place)

    def check(self, is_indexed: Callable[[BlockName], bool]) -> None:
        """Raise AssertionError unless each place is one thing, and each state has the block whose name it bears."""
        named = [*self._place_by_name.values()]
        assert sorted([*self._free, *self._written, *named]) == [*range(self._num_places)], "a place is lost or doubled"
        assert all(map(is_indexed, self._place_by_name)), "a state is kept whose block has gone"
