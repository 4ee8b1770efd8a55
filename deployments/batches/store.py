"""Persistent files and batches: rows in SQLite, contents in a folder.

    folder/batches.sqlite   files and batches with their status, and responses
    folder/files/ID         contents; a batch's outputs grow while it runs, and get their rows when it ends
    folder/uploads/ID       uploads in progress

One process owns the folder, by a lock file; the methods are for one thread at a time. Changes are atomic.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from adapters.private_file import make_private_folder
from deployments.batches.lines import ContentGoneError, open_content
from deployments.batches.pages import delete_rows, forget_ended, read_page
from deployments.batches.response_store import ResponseStore
from deployments.batches.result_file import output_ids
from deployments.batches.tables import batch_of, batches, file_of, files, metadata
from deployments.batches.tenant_bytes import TenantBytes
from deployments.batches.uploads import Uploads
from deployments.batches.values import (
    INPUT_PURPOSE,
    MAX_PART_BYTES,
    MIN_FILE_BYTES,
    OUTPUT_PURPOSE,
    UNFINISHED,
    WINDOW_S,
    Batch,
    BatchStatus,
    NewBatch,
    NewFile,
    Page,
    PageQuestion,
    StoredFile,
)
from deployments.config import BatchesConfig
from deployments.database import open_database
from engine.errors import RequestError

MAX_DROPPED = 10_000
"""Files deleted at once: others wait meanwhile, and SQLite refuses a statement that names more than some 32,000."""

_READ_BY_BATCHES = select(batches.c.input_file_id).where(batches.c.status.in_(UNFINISHED))


class FolderTakenError(Exception):
    """Another process owns the folder."""


class BatchStore:
    """The files and batches in a folder, which this object owns exclusively.

    Args:
        clock: returns Unix seconds; files and batches expire by it.

    Attributes:
        uploads: what is to become a file, by `finish_upload`.

    Raises:
        FolderTakenError: another process owns the folder.
        OSError, sqlalchemy.exc.SQLAlchemyError: the folder or its database cannot be used.
    """

    def __init__(self, config: BatchesConfig, clock: Callable[[], float] = time.time) -> None:
        folder = Path(config.folder)
        self._files, self._uploads = folder / "files", folder / "uploads"
        self._config = config
        self.clock = clock
        self.uploads = Uploads(self._uploads, self._check_room)
        self._file_bytes = TenantBytes(files.c.tenant, func.max(files.c.num_bytes, MIN_FILE_BYTES))
        for path in (folder, self._files, self._uploads):
            make_private_folder(path)
        self._lock = _taken(folder / "lock")
        try:
            self._engine = open_database(f"sqlite:///{folder / 'batches.sqlite'}", metadata)
            self._sweep()
            self.responses = ResponseStore(self._engine, config, clock)
        except BaseException:
            # Held on, the next try would take it for another process's.
            os.close(self._lock)
            raise

    def content_path(self, file_id: str) -> str:
        """Return the path of a file's content. `file_id` must be a generated id."""
        return str(self._files / file_id)

    def finish_upload(self, upload_id: str, new: NewFile) -> StoredFile:
        """Store an uploaded content as a tenant's file.

        Raises:
            RequestError: the tenant's storage limit would be exceeded.
            UnavailableError: the upload does not exist any more.
        """
        path, num_bytes = self.uploads.complete(upload_id)
        try:
            self._check_room(new.tenant, num_bytes)
        except RequestError:
            self.uploads.drop(upload_id)
            raise
        stored = self._stored(f"file-{uuid.uuid4().hex}", new, num_bytes)
        # Content first: content without a row is removed at the next start, but a row without content would be broken.
        os.replace(path, self._files / stored.file_id)
        self.uploads.drop(upload_id)
        try:
            with self._file_bytes.changes() as change, self._engine.begin() as connection:
                connection.execute(insert(files), [asdict(stored)])
                change[new.tenant] += _counted(num_bytes)
        except SQLAlchemyError:
            (self._files / stored.file_id).unlink(missing_ok=True)
            raise
        return stored

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file of a tenant.

        Raises:
            RequestError: the tenant has no such file.
        """
        with self._engine.connect() as connection:
            return self._file(connection, tenant, file_id)

    def list_files(self, tenant: str, question: PageQuestion) -> Page[StoredFile]:
        """Return a page of a tenant's files.

        Raises:
            RequestError: `after` neither is one of them nor was one in the last day.
        """
        statement = select(files).where(self._is_current())
        if question.purpose is not None:
            statement = statement.where(files.c.purpose == question.purpose)
        return read_page(self._engine, statement, files.c.file_id, file_of, tenant, question)

    def read_file(self, tenant: str, file_id: str, offset: int) -> bytes:
        """Return the part of a file's content that begins at `offset`; empty at the end.

        Raises:
            RequestError: the tenant has no such file, or its content is gone.
        """
        stored = self.file(tenant, file_id)
        try:
            with open_content(self.content_path(stored.file_id)) as file:
                file.seek(offset)
                return file.read(MAX_PART_BYTES)
        except ContentGoneError:
            message = f"The content of the file '{file_id}' is gone; upload it again."
            raise RequestError(message, field="file_id", code="file_not_found") from None

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant.

        Raises:
            RequestError: the tenant has no such file, or an unfinished batch reads it.
        """
        with self._file_bytes.changes() as change, self._engine.begin() as connection:
            change[tenant] -= _counted(self._file(connection, tenant, file_id).num_bytes)
            if file_id in connection.scalars(_READ_BY_BATCHES).all():
                raise RequestError(
                    f"An unfinished batch reads the file '{file_id}'; cancel it first.",
                    field="file_id",
                    code="file_in_use",
                )
            # First, here and below: to change rows takes room, and on a full disk there may be none before.
            (self._files / file_id).unlink(missing_ok=True)
            delete_rows(connection, [file_id], self.clock())

    def drop_expired(self) -> int:
        """Delete expired files, at most `MAX_DROPPED`, and responses, and abandoned uploads; return how many files."""
        self.responses.drop_expired()
        now_s = self.clock()
        c = files.c
        with self._file_bytes.changes() as change, self._engine.begin() as connection:
            is_expired = (c.expires_s <= now_s) & c.file_id.not_in(_READ_BY_BATCHES)
            chosen = select(c.file_id, c.tenant, c.num_bytes).where(is_expired).limit(MAX_DROPPED)
            expired = connection.execute(chosen).all()
            for file_id, tenant, num_bytes in expired:
                (self._files / file_id).unlink(missing_ok=True)
                change[tenant] -= _counted(num_bytes)
            if expired:
                delete_rows(connection, [row.file_id for row in expired], now_s)
        self.uploads.drop_abandoned()
        return len(expired)

    def is_full(self, tenant: str) -> bool:
        """Return whether a tenant's files, with what its unfinished batches have written, leave no room for more."""
        return self._tenant_bytes(tenant) >= self._config.max_tenant_bytes

    def add_batch(self, new: NewBatch) -> Batch:
        """Store a new batch.

        Raises:
            RequestError: its input is not a batch input file of the tenant, too many batches are unfinished, or there
                is no room for its output.
        """
        now_s = int(self.clock())
        used = self._tenant_bytes(new.tenant)
        with self._engine.begin() as connection:
            c = batches.c
            source = self._file(connection, new.tenant, new.input_file_id, field="input_file_id")
            if source.purpose != INPUT_PURPOSE:
                message = f"The file '{source.file_id}' has the purpose '{source.purpose}', not '{INPUT_PURPOSE}'."
                raise RequestError(message, field="input_file_id", code="invalid_value")
            of_tenant = select(func.count()).where(c.tenant == new.tenant, c.status.in_(UNFINISHED))
            limit = self._config.max_unfinished
            if connection.execute(of_tenant).scalar_one() >= limit:
                message = f"{limit} batches are unfinished already; no more are allowed at once."
                raise RequestError(message, field="input_file_id", code="batch_limit_exceeded")
            if used >= self._config.max_tenant_bytes:
                raise self._full(used, field="input_file_id")
            batch = Batch(
                **asdict(new),
                batch_id=f"batch_{uuid.uuid4().hex}",
                status=BatchStatus.VALIDATING,
                created_s=now_s,
                expires_s=now_s + int(WINDOW_S),
            )
            connection.execute(insert(batches), [asdict(batch)])
            forget_ended(connection, new.tenant)
        return batch

    def batch(self, batch_id: str, tenant: str | None = None) -> Batch:
        """Return a batch; if `tenant` is given, only one of that tenant.

        Raises:
            RequestError: there is no such batch.
        """
        with self._engine.connect() as connection:
            return self._batch(connection, batch_id, tenant)

    def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches, newest first unless the question says otherwise.

        Raises:
            RequestError: `after` is not one of them.
        """
        return read_page(self._engine, select(batches), batches.c.batch_id, batch_of, tenant, question)

    def unfinished(self) -> list[Batch]:
        """Return all unfinished batches, oldest first."""
        statement = select(batches).where(batches.c.status.in_(UNFINISHED)).order_by(batches.c.number)
        with self._engine.connect() as connection:
            return [batch_of(row) for row in connection.execute(statement).mappings()]

    def move(self, batch_id: str, to: BatchStatus, *, out_of: Iterable[BatchStatus], **changes: Any) -> Batch:
        """Move a batch to a status and change further fields, if its status is in `out_of`; else change nothing.

        Returns the resulting batch.
        """
        with self._engine.begin() as connection:
            batch = self._batch(connection, batch_id, None)
            if batch.status in tuple(out_of):
                batch = self._moved(connection, batch, to, **changes)
        return batch

    def finish(self, batch_id: str, to: BatchStatus, **changes: Any) -> Batch:
        """End a batch and, in the same transaction, turn its non-empty output files into files of its tenant."""
        with self._file_bytes.changes() as change, self._engine.begin() as connection:
            batch = self._batch(connection, batch_id, None)
            if batch.status not in UNFINISHED:
                return batch
            kept = {}
            for kind, file_id in zip(("output", "error"), output_ids(batch_id), strict=True):
                num_bytes = _size(self._files / file_id)
                if not num_bytes:
                    (self._files / file_id).unlink(missing_ok=True)
                else:
                    kept[f"{kind}_file_id"] = file_id
                    name = f"{batch_id}_{kind}.jsonl"
                    new = NewFile(tenant=batch.tenant, name=name, purpose=OUTPUT_PURPOSE, lasts_s=batch.outputs_last_s)
                    connection.execute(insert(files), [asdict(self._stored(file_id, new, num_bytes))])
                    change[batch.tenant] += _counted(num_bytes)
            return self._moved(connection, batch, to, **kept, **changes)

    def close(self) -> None:
        """Close the database and release the folder."""
        self._engine.dispose()
        os.close(self._lock)

    def _stored(self, file_id: str, new: NewFile, num_bytes: int) -> StoredFile:
        now_s = int(self.clock())
        return StoredFile(
            file_id=file_id,
            tenant=new.tenant,
            name=new.name,
            purpose=new.purpose,
            num_bytes=num_bytes,
            created_s=now_s,
            expires_s=None if new.lasts_s is None else now_s + new.lasts_s,
        )

    def _moved(self, connection: Connection, batch: Batch, to: BatchStatus, **changes: Any) -> Batch:
        reached = batch.reached_s | {str(to): int(self.clock())}
        moved = replace(batch, status=to, reached_s=reached, **changes)
        connection.execute(update(batches).where(batches.c.batch_id == batch.batch_id).values(**asdict(moved)))
        return moved

    def _batch(self, connection: Connection, batch_id: str, tenant: str | None) -> Batch:
        statement = select(batches).where(batches.c.batch_id == batch_id)
        if tenant is not None:
            statement = statement.where(batches.c.tenant == tenant)
        row = connection.execute(statement).mappings().one_or_none()
        if row is None:
            raise RequestError(f"There is no batch '{batch_id[:128]}'.", field="batch_id", code="batch_not_found")
        return batch_of(row)

    def _file(self, connection: Connection, tenant: str, file_id: str, *, field: str = "file_id") -> StoredFile:
        c = files.c
        statement = select(files).where(c.file_id == file_id, c.tenant == tenant, self._is_current())
        row = connection.execute(statement).mappings().one_or_none()
        if row is None:
            raise RequestError(f"There is no file '{file_id[:128]}'.", field=field, code="file_not_found")
        return file_of(row)

    def _is_current(self) -> Any:
        return (files.c.expires_s.is_(None)) | (files.c.expires_s > self.clock())

    def _tenant_bytes(self, tenant: str) -> int:
        # Their output is not among the files before they end.
        c = batches.c
        running = select(c.batch_id).where(c.tenant == tenant, c.status.in_(UNFINISHED))
        with self._engine.connect() as connection:
            num_bytes = self._file_bytes.of(connection, tenant)
            batch_ids = connection.execute(running).scalars().all()
        return num_bytes + sum(_size(self._files / file_id) for i in batch_ids for file_id in output_ids(i))

    def _check_room(self, tenant: str, num_bytes: int, on_their_way: int = 0) -> None:
        used = self._tenant_bytes(tenant) + on_their_way
        if used + _counted(num_bytes) > self._config.max_tenant_bytes:
            raise self._full(used, field="file")

    def _full(self, used: int, *, field: str) -> RequestError:
        limit = self._config.max_tenant_bytes
        kept = f"Files of {used} bytes are kept already, or on their way"
        message = f"{kept}; {limit} are allowed (`batches.max_tenant_bytes`). Delete some."
        return RequestError(message, field=field, code="storage_full")

    def _sweep(self) -> None:
        """Remove uploads and contents without a row, and rows without content, left by a process that died between."""
        with self._engine.begin() as connection:
            known = set(connection.execute(select(files.c.file_id)).scalars())
            for file_id in known - {path.name for path in self._files.iterdir()}:
                delete_rows(connection, [file_id], self.clock())
        for batch in self.unfinished():
            known.update(output_ids(batch.batch_id))
        for path in (*self._uploads.iterdir(), *self._files.iterdir()):
            if path.name not in known:
                path.unlink(missing_ok=True)


def _counted(num_bytes: int) -> int:
    return max(num_bytes, MIN_FILE_BYTES)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _taken(path: Path) -> int:
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        # The kernel releases it however the process ends.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise FolderTakenError(str(path)) from error
    return lock
