"""The one actor that keeps files and runs batches. It resumes by itself what an earlier one has not finished.

It asks a gateway for each line as the tenant that made the batch (`deployments.gateway.inside.answer_inside`), so that
a line is what the same request by HTTP would have been: its limits, screening and usage records, behind all others in
the engine's queue.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.actor_process import begin_actor
from deployments.batches.disk import Disk
from deployments.batches.runner import Ask
from deployments.batches.server import RETRY_AFTER_S, BatchServer
from deployments.batches.store import BatchStore, FolderTakenError
from deployments.batches.values import InsideAnswer, InsideCall
from deployments.config import GATEWAY, BatchesConfig
from deployments.handle_calls import until_answered

_logger = logging.getLogger(__name__)

LOCK_POLL_S = 1.0
TIDY_S = 60.0


class Batches(BatchServer):
    """The deployment `Batches`; there is one replica of it."""

    async def __init__(self, config: BatchesConfig, ask: Ask | None = None) -> None:  # type: ignore[misc]
        """Begin to open the folder, and to run what an earlier actor has left; Serve awaits it.

        Args:
            ask: answers the lines; None for the gateways of this application.
        """
        begin_actor()
        super().__init__(config, Disk(), ask or _gateways())
        self._opening = asyncio.create_task(self._open())

    def check_health(self) -> None:
        """Fail where the folder could not be opened for another reason than that it is taken, or a full disk."""
        if self._opening.done():
            self._opening.result()

    async def _open(self) -> None:
        """Open the folder, which one server at a time may have, then tidy it for ever."""
        store, is_told = None, False
        while store is None:
            try:
                store = await self._disk.surely(BatchStore, self._config)
            except FolderTakenError:
                if not is_told:
                    _logger.warning("%s is another server's: files and batches wait for it", self._config.folder)
                is_told = True
                await asyncio.sleep(LOCK_POLL_S)
        await self.resume(store)
        while True:
            await self._disk.surely(store.drop_expired)
            await asyncio.sleep(TIDY_S)


def _gateways() -> Ask:
    """Return what asks whichever gateway has room."""
    return partial(ask_gateway, serve.get_deployment_handle(GATEWAY, serve.get_replica_context().app_name))


async def ask_gateway(gateways: DeploymentHandle, call: InsideCall) -> InsideAnswer:
    """Ask a gateway; where none can be asked, the answer is a 503 of our own."""
    try:
        found: InsideAnswer = await until_answered(gateways.answer_inside.remote(call))
    except (RayError, RayServeException) as error:
        _logger.info("a line of a batch is asked for again: %s", error)
        return InsideAnswer(status=503, retry_after_s=RETRY_AFTER_S)
    return found
