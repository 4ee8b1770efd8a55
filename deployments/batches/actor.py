"""The single actor that stores files and runs batches. On start it resumes batches that an earlier one left unfinished.

It sends each line to a gateway as the tenant that created the batch (`deployments.gateway.inside.answer_inside`), so a
line is treated like the same HTTP request, with its limits, screening and usage records, but queues in the engine
behind all other requests.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ray import serve
from ray.serve.handle import DeploymentHandle
from sqlalchemy.exc import SQLAlchemyError

from deployments.actor_process import begin_actor
from deployments.batches.runner import Ask
from deployments.batches.server import RETRY_AFTER_S, BatchServer
from deployments.batches.store import BatchStore, FolderTakenError
from deployments.batches.values import InsideAnswer, InsideCall
from deployments.config import GATEWAY, BatchesConfig
from deployments.disk import Disk
from deployments.errors import error_body
from deployments.handle_calls import UNREACHED, canceled_as_lost
from engine.errors import ConfigError

_logger = logging.getLogger(__name__)

LOCK_POLL_S = 1.0
TIDY_S = 60.0
MAX_SILENT_S = 30.0
"""A gateway that has given no sign of life for so long is lost; it gives one every `deployments.gateway.inside.BEAT_S`
seconds."""
LOST = InsideAnswer(
    status=502,
    body=error_body("The gateways that this request was sent to were lost before they answered.", kind="server_error"),
    retry_after_s=RETRY_AFTER_S,
)
"""A gateway that died under way may have died of the line, which is asked a few times only (`Retries`)."""


class Batches(BatchServer):
    """The deployment `Batches`, which has a single replica."""

    async def __init__(self, config: BatchesConfig, ask: Ask | None = None) -> None:  # type: ignore[misc]
        """Start opening the folder and resuming unfinished batches in the background. Awaited by Serve.

        Args:
            ask: answers the lines; None for the gateways of this application.
        """
        begin_actor()
        if ask is None:
            gateways = serve.get_deployment_handle(GATEWAY, serve.get_replica_context().app_name)
            ask = partial(ask_gateway, gateways.options(stream=True))
        super().__init__(config, Disk("batches"), ask)
        self._opening = asyncio.create_task(self._open())

    def check_health(self) -> None:
        """Raise if opening the folder failed for a reason other than that it is taken or the disk is in trouble."""
        if self._opening.done():
            self._opening.result()

    async def _open(self) -> None:
        """Open the folder, which only one server may hold, then tidy it periodically forever."""
        store, is_told = None, False
        while store is None:
            try:
                store = await self._disk.surely(BatchStore, self._config)
            except FolderTakenError:
                if not is_told:
                    _logger.warning(
                        "%s is in use by another server: files and batches wait for it", self._config.folder
                    )
                is_told = True
                await asyncio.sleep(LOCK_POLL_S)
            except SQLAlchemyError as error:
                reason = f"args.batches.folder: the database in {self._config.folder} cannot be opened: {error.args[0]}"
                # Serve says of a failed health check only that it failed.
                _logger.error(reason)
                raise ConfigError(reason) from error
        await self.resume(store)
        while True:
            await self._disk.surely(store.drop_expired)
            await asyncio.sleep(TIDY_S)


async def ask_gateway(gateways: DeploymentHandle, call: InsideCall) -> InsideAnswer:
    """Return a gateway's answer, or one of our own: 503 if none can be reached, `LOST` if the one that was is lost.

    Args:
        gateways: a streaming handle. Without signs of life, calls to a machine that has vanished last for minutes.
    """
    answer: InsideAnswer | None = None
    unanswered = InsideAnswer(status=503, retry_after_s=RETRY_AFTER_S)
    signs = gateways.answer_inside.remote(call)
    try:
        with canceled_as_lost():
            async with asyncio.timeout(MAX_SILENT_S) as silence:
                async for sign in signs:
                    answer, unanswered = sign, LOST
                    silence.reschedule(asyncio.get_running_loop().time() + MAX_SILENT_S)
    except UNREACHED as error:
        _logger.info("a line of a batch is asked for again: %s", error)
    finally:
        if answer is None:
            signs.cancel()
    return answer or unanswered
