"""States kept at the ends of some blocks, as numbers: which place holds which state, and which is evicted next.

    prefix   [ block ][ block ][ block ][ block ][ block ]
    state                     |^                |^            each is named like the block that it follows

For layers that keep a state instead of keys, a cached prefix reaches only to a position with both its blocks and a
state. Knows neither tokens nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from engine.cache.prefix_index import BlockName


class Snapshots:
    """A fixed number of places for states: each is free, being written by a step in flight, or named.

    The least recently used state is evicted first.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._place_by_name: OrderedDict[BlockName, int] = OrderedDict()
        self._free: list[int] = [*range(num_places)]
        self._written: set[int] = set()

    def __contains__(self, name: BlockName) -> bool:
        return name in self._place_by_name

    def longest(self, names: Sequence[BlockName], reached: Callable[[Sequence[BlockName]], int]) -> int:
        """Return how many leading blocks of a chain can be reused.

        Args:
            reached: returns the same for the blocks alone, without regard to states.
        """
        count = reached(names)
        while count:
            while count and names[count - 1] not in self._place_by_name:
                count -= 1
            # With windows, a shorter chain may need parts that the longer one did not.
            there = reached(names[:count])
            if there == count:
                break
            count = there
        return count

    def use(self, name: BlockName) -> int:
        """Return the place of a state and mark it as just used."""
        self._place_by_name.move_to_end(name)
        return self._place_by_name[name]

    def try_take(self) -> int | None:
        """Take a place to write, free or of an evicted state; None if all are being written.

        The evicted state can no longer be found, but earlier steps may still read it: steps are computed in order.
        """
        if not self._free and self._place_by_name:
            self.forget(next(iter(self._place_by_name)))
        if not self._free:
            return None
        place = self._free.pop()
        self._written.add(place)
        return place

    def settle(self, place: int, name: BlockName) -> bool:
        """Name a written state; if another place already holds it, free this one and return False."""
        self._written.remove(place)
        if name in self._place_by_name:
            self._free.append(place)
            self._place_by_name.move_to_end(name)
            return False
        self._place_by_name[name] = place
        return True

    def give_back(self, places: Collection[int]) -> None:
        """Free those of the places that are still being written: their request has ended or failed."""
        for place in self._written.intersection(places):
            self._written.remove(place)
            self._free.append(place)

    def forget(self, name: BlockName) -> None:
        """Free the place of a state that is no longer useful; ignore one that is not kept."""
        place = self._place_by_name.pop(name, None)
        if place is not None:
            self._free.append(place)

    def check(self, is_indexed: Callable[[BlockName], bool]) -> None:
        """Raise AssertionError unless each place is free, written or named, and each name has an indexed block."""
        named = [*self._place_by_name.values()]
        assert sorted([*self._free, *self._written, *named]) == [*range(self._num_places)], "a place is lost or doubled"
        assert all(map(is_indexed, self._place_by_name)), "a state is kept whose block has gone"
