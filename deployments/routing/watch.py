"""A gateway's end of routing: asks replicas for reports and applies them to the boards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from ray.serve.handle import DeploymentHandle

from deployments.generation_calls import TokenAddress
from deployments.handle_calls import ask_all
from deployments.routing.board import Board, board_of
from deployments.routing.report import FORMAT, LoadReport
from deployments.waits import for_ever
from engine.request import RequestId

POLL_S = 0.25
MAX_PAUSE_S = 60.0
"""The pause between two rounds doubles up to this while the same replicas are not heard: they may be unable to dial."""
ASK_TIMEOUT_S = 5.0


class ReplicaWatch:
    """The boards of all models, and the task that asks replicas for reports. Bound to one event loop.

    Args:
        handles: handle of each model's deployment, by name.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles
        self.boards: dict[str, Board] = {name: board_of(name) for name in handles}
        self._paces = {name: _Pace() for name in handles}
        self._task: asyncio.Task[None] | None = None

    def start(self, address: TokenAddress) -> None:
        """Start asking the replicas of every model that has several to report to `address`."""
        ask, pause = partial(self._ask, address), partial(asyncio.sleep, POLL_S)
        self._task = asyncio.create_task(for_ever(ask, pause, "replicas could not be asked for reports"))

    def hear(self, report: LoadReport, connection: object) -> None:
        """Apply a report to its model's board."""
        board = self.boards.get(report.model)
        if board is not None:
            board.hear(report, time.monotonic(), connection)

    def lose(self, connection: object) -> list[RequestId]:
        """Void the reports of a connection that has ended, and return the requests that were sent to its replica."""
        now_s = time.monotonic()
        return [request_id for board in self.boards.values() for request_id in board.lose_source(connection, now_s)]

    async def _ask(self, address: TokenAddress) -> None:
        now_s = time.monotonic()
        due = [name for name, board in self.boards.items() if self._paces[name].is_due(board.unheard(), now_s)]
        asked = (ask_all(self._handles[name], "watch", address, FORMAT, timeout_s=ASK_TIMEOUT_S) for name in due)
        await asyncio.gather(*asked)


class _Pace:
    """When to ask a model's replicas again: all of them answer with whole reports, though one may never be heard."""

    def __init__(self) -> None:
        self._unheard: frozenset[str] = frozenset()
        self._pause_s = self._due_s = 0.0

    def is_due(self, unheard: frozenset[str], now_s: float) -> bool:
        """Return whether to ask now, given the replicas that have not reported."""
        if unheard != self._unheard:
            self._unheard, self._pause_s = unheard, POLL_S
        elif not unheard or now_s < self._due_s:
            return False
        else:
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        self._due_s = now_s + self._pause_s
        return bool(unheard)
