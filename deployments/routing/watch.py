"""A gateway's end of routing: asks replicas to report, and puts what they tell on the boards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from ray.serve.handle import DeploymentHandle

from deployments.generation_calls import TokenAddress
from deployments.handles import ask_all
from deployments.routing.board import Board, board_of
from deployments.routing.report import LoadReport
from engine.request import RequestId

POLL_S = 0.25
ASK_TIMEOUT_S = 5.0


class ReplicaWatch:
    """The boards of all models, and the task that keeps them told. Lives on one event loop.

    Args:
        handles: of each model's deployment.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles
        self.boards: dict[str, Board] = {name: board_of(name) for name in handles}
        self._task: asyncio.Task[None] | None = None

    def start(self, address: TokenAddress) -> None:
        """Ask replicas to report to `address`, as soon as a model has several."""
        self._task = asyncio.create_task(self._run(address))

    def hear(self, report: LoadReport, connection: object) -> None:
        """Take over a report."""
        board = self.boards.get(report.model)
        if board is not None:
            board.hear(report, time.monotonic(), connection)

    def lose(self, connection: object) -> list[RequestId]:
        """Forget what came by a connection that has ended, and return the requests that were sent to its replica."""
        now_s = time.monotonic()
        return [request_id for board in self.boards.values() for request_id in board.lose_source(connection, now_s)]

    async def _run(self, address: TokenAddress) -> None:
        while True:
            unheard = [name for name, board in self.boards.items() if board.wants_reports()]
            # Who does not answer is asked again with the next round.
            await asyncio.gather(
                *(ask_all(self._handles[name], "watch", address, timeout_s=ASK_TIMEOUT_S) for name in unheard)
            )
            await asyncio.sleep(POLL_S)
