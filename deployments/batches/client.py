"""A gateway's client of the single actor for files, batches and kept responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.batches.values import Batch, KeptResponse, NewBatch, NewFile, Page, PageQuestion, StoredFile
from deployments.handle_calls import ask_actor

RETRY_AFTER_S = 5.0
TIMEOUT_S = 30.0
"""Bound on one call. Serve replaces an actor that hangs, but not one whose disk does."""


class Upload:
    """A file on its way to the actor, within its tenant's storage from the start. Errors as those of `BatchClient`.

    Attributes:
        upload_id: None before the first claim and once it is stored.
    """

    def __init__(self, stored: Callable[..., Awaitable[Any]], tenant: str) -> None:
        self.upload_id: str | None = None
        self._stored = stored
        self._tenant = tenant

    async def claim(self, num_bytes: int) -> None:
        """Claim room for a content of so many bytes, or of more."""
        if self.upload_id is None:
            self.upload_id = await self._stored("uploads.begin", self._tenant, num_bytes)
        else:
            await self._stored("uploads.grow", self.upload_id, num_bytes)

    async def store(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """Upload the content, for which room was claimed, in parts, and store it as a file of the tenant."""
        offset = 0
        async for part in content:
            await self._stored("uploads.append", self.upload_id, offset, part)
            offset += len(part)
        stored: StoredFile = await self._stored("finish_upload", self.upload_id, new)
        self.upload_id = None
        return stored


class BatchClient:
    """Files, batches and kept responses of tenants.

    Every method raises `RequestError` (no such object, or not permitted) and `UnavailableError` (the actor cannot be
    reached or does not answer, or its disk is not available now).
    """

    def __init__(self, actor: DeploymentHandle) -> None:
        self._actor = actor
        absence = "Files and batches cannot be reached."
        self._ask = partial(ask_actor, actor, absence=absence, retry_after_s=RETRY_AFTER_S, timeout_s=TIMEOUT_S)
        self._stored = partial(self._ask, "stored")

    @asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Upload]:
        """Begin to upload a file of a tenant; what is not stored at the end of the block is dropped."""
        upload = Upload(self._stored, tenant)
        try:
            yield upload
        finally:
            if upload.upload_id is not None:
                # Not awaited: abandoned uploads expire by themselves after an hour.
                self._actor.stored.remote("uploads.drop", upload.upload_id)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file of a tenant."""
        stored: StoredFile = await self._stored("file", tenant, file_id)
        return stored

    async def list_files(self, tenant: str, question: PageQuestion) -> Page[StoredFile]:
        """Return a page of a tenant's files."""
        page: Page[StoredFile] = await self._stored("list_files", tenant, question)
        return page

    async def content(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield a file's content in parts."""
        offset = 0
        while part := await self._stored("read_file", tenant, file_id, offset):
            offset += len(part)
            yield part

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant."""
        await self._stored("delete_file", tenant, file_id)

    async def create(self, new: NewBatch) -> Batch:
        """Store a batch and start running it."""
        batch: Batch = await self._ask("create", new)
        return batch

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return the current state of a tenant's batch."""
        batch: Batch = await self._ask("batch", tenant, batch_id)
        return batch

    async def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches in their current state."""
        page: Page[Batch] = await self._ask("list_batches", tenant, question)
        return page

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel a batch; lines already answered stay in its output file."""
        batch: Batch = await self._ask("cancel", tenant, batch_id)
        return batch

    async def keep_response(self, response: KeptResponse) -> None:
        """Store a response."""
        await self._stored("responses.keep", response)

    async def response(self, tenant: str, response_id: str) -> KeptResponse:
        """Return a response of a tenant."""
        response: KeptResponse = await self._stored("responses.one", tenant, response_id)
        return response

    async def responses(self, tenant: str, response_ids: Collection[str]) -> list[KeptResponse]:
        """Return those of the responses that the tenant has."""
        responses: list[KeptResponse] = await self._stored("responses.several", tenant, response_ids)
        return responses

    async def conversation(self, tenant: str, response_id: str) -> list[KeptResponse]:
        """Return a response of a tenant and all that it continues, oldest first."""
        responses: list[KeptResponse] = await self._stored("responses.conversation", tenant, response_id)
        return responses

    async def forget_response(self, tenant: str, response_id: str) -> None:
        """Delete a response of a tenant."""
        await self._stored("responses.forget", tenant, response_id)
