"""The logic of the actor `Batches`, independent of Ray: files, running batches and kept responses."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from operator import attrgetter
from typing import Any

from deployments.batches.runner import Ask, BatchRunner
from deployments.batches.store import BatchStore
from deployments.batches.values import UNFINISHED, Batch, BatchStatus, NewBatch, Page, PageQuestion
from deployments.config import BatchesConfig
from deployments.disk import Disk
from deployments.errors import UnavailableError
from deployments.room import Room
from deployments.waits import detached
from engine.errors import RequestError

_logger = logging.getLogger(__name__)

RESTART_S = 10.0
"""Seconds until a batch is resumed after its runner failed."""
RETRY_AFTER_S = 5.0


class BatchServer:
    """Files, batches and responses of tenants.

    Every method also raises `UnavailableError` if the store is not open yet or its disk is not available now.

    Attributes:
        store: None until `resume`.
    """

    def __init__(self, config: BatchesConfig, disk: Disk, ask: Ask) -> None:
        self.store: BatchStore | None = None
        self._config = config
        self._disk = disk
        self._ask = ask
        self._room = Room(config.max_concurrent_requests, num_guests=0)
        self._runners: dict[str, BatchRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def stored(self, method: str, *args: object) -> Any:
        """Return what a method of the store, or of a part of it (`uploads.begin`), returns for the arguments.

        For all that neither starts nor changes a batch. Errors as in that method.
        """
        return await self._disk.once(attrgetter(method)(self._opened), *args)

    async def resume(self, store: BatchStore) -> None:
        """Start serving from a store and resume its unfinished batches."""
        unfinished = await self._disk.surely(store.unfinished)
        self.store = store
        for batch in unfinished:
            self._start(batch)

    async def create(self, new: NewBatch) -> Batch:
        """Store a batch and start running it. Errors as in `BatchStore.add_batch`."""
        # Detached, here and in `cancel`: a cancelled request must not stop it between the disk and the runner.
        return await asyncio.shield(detached(self._create(new)))

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return the current state of a tenant's batch. Errors as in `BatchStore.batch`."""
        return self._counted(await self._disk.once(self._opened.batch, batch_id, tenant))

    async def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches in their current state. Errors as in `BatchStore.list_batches`."""
        page = await self._disk.once(self._opened.list_batches, tenant, question)
        return replace(page, items=tuple(map(self._counted, page.items)))

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch; lines already answered stay in its output file.

        Raises:
            RequestError: there is no such batch, or it has ended.
        """
        return await asyncio.shield(detached(self._cancel(tenant, batch_id)))

    async def _create(self, new: NewBatch) -> Batch:
        batch = await self._disk.once(self._opened.add_batch, new)
        self._start(batch)
        return batch

    async def _cancel(self, tenant: str, batch_id: str) -> Batch:
        batch = await self.batch(tenant, batch_id)
        if batch.status not in UNFINISHED:
            raise RequestError(
                f"The batch has the status '{batch.status}' and cannot be cancelled.",
                field="batch_id",
                code="batch_not_cancellable",
            )
        out_of = [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS]
        batch = await self._disk.once(self._opened.move, batch_id, BatchStatus.CANCELLING, out_of=out_of)
        if batch.status is BatchStatus.CANCELLING and batch_id in self._runners:
            self._runners[batch_id].cancel()
        return self._counted(batch)

    @property
    def _opened(self) -> BatchStore:
        if self.store is None:
            raise UnavailableError(
                "Files and batches are not ready yet, or another server uses their folder ('batches.folder').",
                retry_after_s=RETRY_AFTER_S,
            )
        return self.store

    def _counted(self, batch: Batch) -> Batch:
        runner = self._runners.get(batch.batch_id)
        return batch if runner is None else replace(batch, counts=runner.counts)

    def _start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.batch_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.batch_id, None))

    async def _run(self, batch: Batch) -> None:
        while True:
            runner = BatchRunner(self._config, self._opened, self._disk, self._ask, self._room, batch)
            self._runners[batch.batch_id] = runner
            try:
                await runner.run()
            except Exception:
                # Top of the task: a failed batch is resumed from its state on disk.
                _logger.exception("running %s failed; it is tried again", batch.batch_id)
            else:
                return
            finally:
                del self._runners[batch.batch_id]
            await self._disk.sleep(RESTART_S)
            batch = await self._disk.surely(self._opened.batch, batch.batch_id)
