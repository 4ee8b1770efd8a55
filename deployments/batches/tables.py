"""The database of files and batches: its tables, and how their rows become values."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sqlalchemy import Column, Engine, Index, Integer, MetaData, RowMapping, String, Table, Text, create_engine, event

from deployments.batches.values import Batch, BatchCounts, BatchStatus, LineError, StoredFile

metadata = MetaData()
files = Table(
    "file",
    metadata,
    # Grows with every file, so that a page of a list begins where the one before has ended.
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("file_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("name", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", Integer, nullable=False),
    Column("created_s", Integer, nullable=False),
    Column("expires_s", Integer),
    Index("file_by_tenant", "tenant", "number"),
    sqlite_autoincrement=True,
)
batches = Table(
    "batch",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("batch_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("metadata", Text),
    Column("outputs_last_s", Integer),
    Column("status", String(16), nullable=False),
    Column("created_s", Integer, nullable=False),
    Column("expires_s", Integer, nullable=False),
    Column("reached_s", Text, nullable=False),
    Column("model", String(256)),
    Column("errors", Text, nullable=False),
    Column("counts", Text, nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Index("batch_by_tenant", "tenant", "number"),
    Index("batch_by_status", "status"),
    sqlite_autoincrement=True,
)


def open_database(path: str) -> Engine:
    """Open the SQLite file, made where it is not there; what is committed is on the disk.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: it cannot be opened.
    """
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", _tune)
    metadata.create_all(engine)
    return engine


def batch_row(batch: Batch) -> dict[str, Any]:
    """Return the columns of a batch."""
    row = {name: getattr(batch, name) for name in batches.c.keys() if name != "number"}  # noqa: SIM118 - no mapping
    row["metadata"] = None if batch.metadata is None else json.dumps(batch.metadata)
    row["status"] = str(batch.status)
    row["reached_s"] = json.dumps(batch.reached_s)
    row["errors"] = json.dumps([asdict(error) for error in batch.errors])
    row["counts"] = json.dumps(asdict(batch.counts))
    return row


def batch_of(row: RowMapping) -> Batch:
    """Return the batch of a row."""
    fields = _fields(row)
    fields["metadata"] = None if row["metadata"] is None else json.loads(row["metadata"])
    fields["status"] = BatchStatus(row["status"])
    fields["reached_s"] = json.loads(row["reached_s"])
    fields["errors"] = tuple(LineError(**error) for error in json.loads(row["errors"]))
    fields["counts"] = BatchCounts(**json.loads(row["counts"]))
    return Batch(**fields)


def file_of(row: RowMapping) -> StoredFile:
    """Return the file of a row."""
    return StoredFile(**_fields(row))


def _fields(row: RowMapping) -> dict[str, Any]:
    return {str(name): value for name, value in row.items() if name != "number"}


def _tune(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
