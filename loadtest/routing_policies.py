"""Ways to choose a replica, for comparison: the product's own board, and what else is usual."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from deployments.routing.asked import Asked, hash64
from deployments.routing.board import Board, weight
from deployments.routing.estimate import ReplicaState
from deployments.routing.report import LoadReport
from loadtest.routing_fleet import Replica


class Policy(Protocol):
    """What one gateway does."""

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the place of the replica that gets the request."""
        ...

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Take over a report."""
        ...

    def end(self, request_id: str) -> None:
        """Take note that a request has ended."""
        ...


class Uninformed:
    """A policy that listens to nobody."""

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Ignore it."""

    def end(self, request_id: str) -> None:
        """Ignore it."""


class PowerOfTwo(Uninformed):
    """The emptier of two drawn replicas, by their true numbers of open requests; Serve's default knows them later.

    **Source:** Mitzenmacher, IEEE Transactions on Parallel and Distributed Systems 12(10), 2001.
    """

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        self._rng = rng

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the place of the replica that gets the request."""
        pair = self._rng.sample(range(len(replicas)), 2)
        return min(pair, key=lambda place: replicas[place].num_open(now_s))


class SessionHash(Uninformed):
    """Always the same replica for a session."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        self._ids = replica_ids

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the place of the replica that gets the request."""
        key = hash64(f"session {session}")
        return max(range(len(self._ids)), key=lambda place: weight(key, self._ids[place]))


class PrefixOnly:
    """The replica whose cache holds most of the prompt, as reported; the emptier of two where several hold as much."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        self._rng = rng
        self._place = {replica_id: place for place, replica_id in enumerate(replica_ids)}
        self._states = [ReplicaState(replica_id) for replica_id in replica_ids]

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the place of the replica that gets the request."""
        depths = [_depth(asked, state) for state in self._states]
        deepest = max(depths)
        places = [place for place, depth in enumerate(depths) if depth == deepest]
        pair = self._rng.sample(places, min(2, len(places)))
        return min(pair, key=lambda place: replicas[place].num_open(now_s))

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Take over a report."""
        self._states[self._place[report.replica_id]].hear(report, now_s, None)

    def end(self, request_id: str) -> None:
        """Ignore it."""


class FirstToken:
    """The product's choice."""

    def __init__(self, replica_ids: Sequence[str], rng: random.Random) -> None:
        self._ids = list(replica_ids)
        self._place = {replica_id: place for place, replica_id in enumerate(replica_ids)}
        self._board = Board()
        self._board.set_replicas(self._ids)

    def choose(self, asked: Asked, session: int, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the place of the replica that gets the request."""
        return self._place[self._board.choose(asked, self._ids, now_s)[0]]

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Take over a report."""
        self._board.hear(report, now_s)

    def end(self, request_id: str) -> None:
        """Take note that a request has ended."""
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
