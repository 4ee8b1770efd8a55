"""The one actor that keeps files and runs batches. It resumes by itself what an earlier one has not finished.

It asks a gateway for each line as the tenant that made the batch (`deployments.gateway.inside.answer_inside`), so that
a line is what the same request by HTTP would have been: its limits, screening and usage records, behind all others in
the engine's queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.batches.disk import Disk, Sleep
from deployments.batches.runner import Ask, BatchRunner
from deployments.batches.store import BatchStore, FolderTakenError
from deployments.batches.values import (
    MAX_PART_BYTES,
    UNFINISHED,
    Batch,
    BatchStatus,
    InsideAnswer,
    InsideCall,
    NewBatch,
    NewFile,
    Page,
    PageQuestion,
    StoredFile,
)
from deployments.config import BatchesConfig
from deployments.errors import UnavailableError
from deployments.handle_calls import until_answered
from deployments.logs import join_serve_log
from engine.errors import RequestError

_logger = logging.getLogger(__name__)

LOCK_POLL_S = 1.0
TIDY_S = 60.0
RESTART_S = 10.0
"""Seconds until a batch whose runner has failed is gone on with."""
RETRY_AFTER_S = 5.0


class BatchServer:
    """Files, and batches under way; a plain class, the actor is its shell."""

    def __init__(
        self,
        config: BatchesConfig,
        store: BatchStore,
        disk: Disk,
        ask: Ask,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.store = store
        self.disk = disk
        self._turns = asyncio.Semaphore(config.max_concurrent_requests)
        self._new_runner = partial(BatchRunner, config, store, disk, ask, self._turns, clock=clock, sleep=sleep)
        self._sleep = sleep
        self._runners: dict[str, BatchRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def resume(self) -> None:
        """Go on with what has not ended."""
        for batch in await self.disk.surely(self.store.unfinished):
            self._start(batch)

    async def create(self, new: NewBatch) -> Batch:
        """Keep a batch, and begin to run it; errors as `BatchStore.add_batch`."""
        batch = await self.disk.once(self.store.add_batch, new)
        self._start(batch)
        return batch

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant as it stands."""
        return self._counted(await self.disk.once(self.store.batch, batch_id, tenant))

    async def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches as they stand."""
        page = await self.disk.once(self.store.list_batches, tenant, question)
        return replace(page, items=tuple(map(self._counted, page.items)))

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Give up a batch; what was answered stays in its output file.

        Raises:
            RequestError: there is none of this id, or it has come to its end.
        """
        batch = await self.batch(tenant, batch_id)
        if batch.status not in UNFINISHED:
            raise RequestError(
                f"The batch has the status '{batch.status}' and cannot be cancelled.",
                field="batch_id",
                code="batch_not_cancellable",
            )
        out_of = [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS]
        batch = await self.disk.once(self.store.move, batch_id, BatchStatus.CANCELLING, out_of=out_of)
        if batch.status is BatchStatus.CANCELLING and batch_id in self._runners:
            self._runners[batch_id].cancel()
        return self._counted(batch)

    async def until_idle(self) -> None:
        """Return once no batch is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def _counted(self, batch: Batch) -> Batch:
        runner = self._runners.get(batch.batch_id)
        return batch if runner is None or batch.status not in UNFINISHED else replace(batch, counts=runner.counts)

    def _start(self, batch: Batch) -> None:
        if batch.batch_id in self._tasks:
            return  # two runners would write each line twice
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.batch_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.batch_id, None))

    async def _run(self, batch: Batch) -> None:
        while True:
            self._runners[batch.batch_id] = self._new_runner(batch)
            try:
                await self._runners[batch.batch_id].run()
            except Exception:
                # The task's border: a batch that trips is gone on with from what is on the disk.
                _logger.exception("running %s failed; it is tried again", batch.batch_id)
            else:
                return
            finally:
                del self._runners[batch.batch_id]
            await self._sleep(RESTART_S)
            batch = await self.disk.surely(self.store.batch, batch.batch_id)


class Batches:
    """The deployment `Batches`; there is one replica of it."""

    async def __init__(self, config: BatchesConfig, ask: Ask | None = None) -> None:  # type: ignore[misc]
        """Begin to open the folder, and to run what an earlier actor has left; Serve awaits it.

        Args:
            ask: answers the lines; None for the gateways of this application.
        """
        join_serve_log()
        self._config = config
        self._ask = ask or _gateway(config.gateway)
        self._server: BatchServer | None = None
        self._opening = asyncio.create_task(self._open())

    def check_health(self) -> None:
        """Fail where the folder could not be opened for another reason than that it is taken, or a full disk."""
        if self._opening.done():
            self._opening.result()

    async def begin_upload(self) -> str:
        """Return the name of a new upload."""
        return await self._disk.once(self._store.begin_upload)

    async def append_upload(self, upload_id: str, offset: int, data: bytes) -> None:
        """Put a part of a content in its place."""
        await self._disk.once(self._store.append_upload, upload_id, offset, data)

    async def finish_upload(self, upload_id: str, new: NewFile) -> StoredFile:
        """Keep an uploaded content as a tenant's file."""
        return await self._disk.once(self._store.finish_upload, upload_id, new)

    async def drop_upload(self, upload_id: str) -> None:
        """Forget an upload."""
        await self._disk.once(self._store.drop_upload, upload_id)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file of a tenant."""
        return await self._disk.once(self._store.file, tenant, file_id)

    async def list_files(self, tenant: str, question: PageQuestion) -> Page[StoredFile]:
        """Return a page of a tenant's files."""
        return await self._disk.once(self._store.list_files, tenant, question)

    async def read_file(self, tenant: str, file_id: str, offset: int) -> bytes:
        """Return a part of a file's content from `offset` on; empty at its end."""

        def read() -> bytes:
            stored = self._store.file(tenant, file_id)
            with open(self._store.content_path(stored.file_id), "rb") as file:
                file.seek(offset)
                return file.read(MAX_PART_BYTES)

        return await self._disk.once(read)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant."""
        await self._disk.once(self._store.delete_file, tenant, file_id)

    async def create(self, new: NewBatch) -> Batch:
        """Keep a batch, and begin to run it."""
        return await self._opened.create(new)

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant as it stands."""
        return await self._opened.batch(tenant, batch_id)

    async def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches as they stand."""
        return await self._opened.list_batches(tenant, question)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Give up a batch."""
        return await self._opened.cancel(tenant, batch_id)

    @property
    def _opened(self) -> BatchServer:
        if self._server is None:
            raise UnavailableError("Files and batches are not ready yet.", retry_after_s=RETRY_AFTER_S)
        return self._server

    @property
    def _store(self) -> BatchStore:
        return self._opened.store

    @property
    def _disk(self) -> Disk:
        return self._opened.disk

    async def _open(self) -> None:
        """Open the folder, which one server at a time may have, then tidy it for ever."""
        disk, store, is_told = Disk(), None, False
        while store is None:
            try:
                store = await disk.surely(_open_store, self._config)
            except FolderTakenError:
                if not is_told:
                    _logger.warning("%s is another server's: files and batches wait for it", self._config.folder)
                is_told = True
                await asyncio.sleep(LOCK_POLL_S)
        server = BatchServer(self._config, store, disk, self._ask)
        await server.resume()
        self._server = server
        while True:
            await disk.surely(store.drop_expired)
            await asyncio.sleep(TIDY_S)


def _open_store(config: BatchesConfig) -> BatchStore:
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    return BatchStore(config.folder, max_tenant_bytes=config.max_tenant_bytes, max_unfinished=config.max_unfinished)


def _gateway(name: str) -> Ask:
    """Return what asks whichever gateway has room."""
    handle = serve.get_deployment_handle(name, serve.get_replica_context().app_name)

    async def ask(call: InsideCall) -> InsideAnswer:
        try:
            found: InsideAnswer = await until_answered(handle.answer_inside.remote(call))
        except (RayError, RayServeException) as error:
            _logger.info("a line of a batch is asked for again: %s", error)
            raise UnavailableError("No gateway answers.", retry_after_s=RETRY_AFTER_S) from error
        return found

    return ask
