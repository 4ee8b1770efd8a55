"""Routing policies for comparison: the application's own `Board`, and common alternatives."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from deployments.routing.asked import Asked, hash64
from deployments.routing.board import Board, weight
from deployments.routing.estimate import ReplicaState
from deployments.routing.report import LoadReport
from loadtest.routing_fleet import Replica


class Policy(ABC):
    """The routing policy of one gateway; unless it says otherwise, it ignores reports."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        self._ids = list(replica_ids)
        self._rng = rng

    @abstractmethod
    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the index of the replica that gets the request."""

    def hear(self, report: LoadReport, now_s: float) -> None:  # noqa: B027 - most policies need none
        """Process a replica's report."""

    def end(self, request_id: str) -> None:  # noqa: B027
        """Process the end of a request."""

    def _less_loaded_of_two(self, places: Sequence[int], replicas: Sequence[Replica], now_s: float) -> int:
        """Return the less loaded of two of the places at random, or of the only one."""
        pair = self._rng.sample(places, min(2, len(places)))
        return min(pair, key=lambda place: replicas[place].num_open(now_s))


class PowerOfTwo(Policy):
    """The less loaded of two random replicas, by current open requests; Serve's default learns them with a delay.

    **Source:** Mitzenmacher, IEEE Transactions on Parallel and Distributed Systems 12(10), 2001.
    """

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Look at two."""
        return self._less_loaded_of_two(range(len(replicas)), replicas, now_s)


class SessionHash(Policy):
    """Always the same replica for a session, by rendezvous hashing."""

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Look at the session alone."""
        key = hash64(f"session {session}")
        return max(range(len(self._ids)), key=lambda place: weight(key, self._ids[place]))


class PrefixOnly(Policy):
    """The replica that reports the longest cached prefix of the prompt; on a tie, the less loaded of two at random."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        super().__init__(replica_ids, rng)
        self._state_by_id = {replica_id: ReplicaState(replica_id) for replica_id in replica_ids}

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Look at what is cached."""
        depths = [_depth(asked, state) for state in self._state_by_id.values()]
        deepest = max(depths)
        places = [place for place, depth in enumerate(depths) if depth == deepest]
        return self._less_loaded_of_two(places, replicas, now_s)

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Note what is cached."""
        self._state_by_id[report.replica_id].hear(report, now_s, None)


class FirstToken(Policy):
    """The application's own policy."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        super().__init__(replica_ids, rng)
        self._board = Board()
        self._board.set_replicas(self._ids)

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Ask the board."""
        return self._ids.index(self._board.choose(asked, self._ids, now_s)[0])

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Tell the board."""
        self._board.hear(report, now_s)

    def end(self, request_id: str) -> None:
        """Tell the board."""
        self._board.end(request_id)


def _depth(asked: Asked, state: ReplicaState) -> int:
    depth = 0
    for mark in asked.block_marks:
        if mark not in state.landmarks:
            break
        depth += 1
    return depth


POLICIES: dict[str, Callable[[Sequence[str], random.Random], Policy]] = {
    "power of two": PowerOfTwo,
    "session hash": SessionHash,
    "prefix only": PrefixOnly,
    "expected first token": FirstToken,
}
