"""A gateway's end of routing: asks replicas for reports and applies them to the boards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from ray.serve.handle import DeploymentHandle

from deployments.generation_calls import TokenAddress
from deployments.handle_calls import ask_all
from deployments.routing.board import Board, board_of
from deployments.routing.report import LoadReport
from engine.request import RequestId

POLL_S = 0.25
ASK_TIMEOUT_S = 5.0


class ReplicaWatch:
    """The boards of all models, and the task that asks replicas for reports. Bound to one event loop.

    Args:
        handles: handle of each model's deployment, by name.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles
        self.boards: dict[str, Board] = {name: board_of(name) for name in handles}
        self._task: asyncio.Task[None] | None = None

    def start(self, address: TokenAddress) -> None:
        """Start asking the replicas of every model that has several to report to `address`."""
        self._task = asyncio.create_task(self._run(address))

    def hear(self, report: LoadReport, connection: object) -> None:
        """Apply a report to its model's board."""
        board = self.boards.get(report.model)
        if board is not None:
            board.hear(report, time.monotonic(), connection)

    def lose(self, connection: object) -> list[RequestId]:
        """Void the reports of a connection that has ended, and return the requests that were sent to its replica."""
        now_s = time.monotonic()
        return [request_id for board in self.boards.values() for request_id in board.lose_source(connection, now_s)]

    async def _run(self, address: TokenAddress) -> None:
        while True:
            unheard = [name for name, board in self.boards.items() if board.wants_reports()]
            # Replicas that do not answer are asked again in the next round.
            await asyncio.gather(
                *(ask_all(self._handles[name], "watch", address, timeout_s=ASK_TIMEOUT_S) for name in unheard)
            )
            await asyncio.sleep(POLL_S)
