"""The rows of the runner's buffers: `max_num_seqs` for all requests, plus some reserved for newcomers.

A step in flight needs all of its rows. If every row is taken, a newcomer that should go before the rest of that step
becomes a guest: until its end it occupies a reserved row, which no other request may have. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import ResolvedConfig
from engine.scheduling.live_request import LiveRequest


class Rows:
    """Gives rows to requests (`LiveRequest.row`, `LiveRequest.is_guest`) and takes them back."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._free = list(range(config.num_rows - 1, -1, -1))
        # All: another scheduler may have used the runner before.
        self._released = list(range(config.num_rows))
        self._num_guests = 0

    @property
    def _num_taken(self) -> int:
        return self._config.num_rows - len(self._free)

    @property
    def num_left(self) -> int:
        """How many more requests can have a row."""
        return self._config.max_num_seqs - self._num_taken + self._num_guests

    @property
    def is_left(self) -> bool:
        """Whether any request can have a row."""
        return self.num_left > 0

    @property
    def is_left_for_newcomer(self) -> bool:
        """Whether there is a row for a newcomer."""
        return self.is_left or self._num_guests < self._config.num_guest_rows

    def take(self, live: LiveRequest) -> None:
        """Give a request a row, as a guest if only reserved rows are left."""
        live.is_guest = not self.is_left
        self._num_guests += live.is_guest
        live.row = self._free.pop()

    def give_back(self, live: LiveRequest) -> None:
        """Take a request's row back."""
        assert live.row is not None, "a request without a row gives one back"
        self._free.append(live.row)
        self._released.append(live.row)
        self._num_guests -= live.is_guest
        live.row = None

    def released(self) -> tuple[int, ...]:
        """Return the rows given back since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def check(self, running: Sequence[LiveRequest]) -> None:
        """Raise AssertionError unless exactly the taken rows are held by `running`."""
        rows = [live.row for live in running if live.row is not None]
        assert len(rows) == len(running), "a running request has no row"
        assert sorted([*rows, *self._free]) == list(range(self._config.num_rows)), "a row is lost or doubled"
        num_guests = sum(live.is_guest for live in running)
        assert num_guests == self._num_guests <= self._config.num_guest_rows, "guests are counted wrongly"
        assert len(rows) - num_guests <= self._config.max_num_seqs, "there are more requests than rows"
