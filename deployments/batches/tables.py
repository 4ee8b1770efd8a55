"""The tables of files, batches and responses, and conversion of rows to values; a value's `asdict` is its row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column, Index, Integer, LargeBinary, MetaData, RowMapping, String, Table

from deployments.batches.values import Batch, BatchCounts, BatchStatus, KeptResponse, LineError, StoredFile

metadata = MetaData()
files = Table(
    "file",
    metadata,
    # Grows with every file, so that a page of a list can begin where the previous one ended.
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
deleted_files = Table(
    "deleted_file",
    metadata,
    # As in `file`, which uses no number again.
    Column("number", Integer, primary_key=True),
    Column("file_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("deleted_s", Integer, nullable=False),
    Index("deleted_file_by_time", "deleted_s"),
)
batches = Table(
    "batch",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("batch_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("metadata", JSON(none_as_null=True)),
    Column("outputs_last_s", Integer),
    Column("status", String(16), nullable=False),
    Column("created_s", Integer, nullable=False),
    Column("expires_s", Integer, nullable=False),
    Column("reached_s", JSON, nullable=False),
    Column("model", String(256)),
    Column("errors", JSON, nullable=False),
    Column("counts", JSON, nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Index("batch_by_tenant", "tenant", "number"),
    Index("batch_by_status", "status"),
    sqlite_autoincrement=True,
)

responses = Table(
    "response",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("response_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("previous_id", String(64)),
    Column("created_s", Integer, nullable=False),
    Column("input_items", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("response_by_tenant", "tenant", "number"),
    Index("response_by_time", "created_s"),
    sqlite_autoincrement=True,
)


def batch_of(row: RowMapping) -> Batch:
    """Return the batch of a row."""
    fields = _fields(row)
    fields["status"] = BatchStatus(row["status"])
    fields["errors"] = tuple(LineError(**error) for error in row["errors"])
    fields["counts"] = BatchCounts(**row["counts"])
    return Batch(**fields)


def file_of(row: RowMapping) -> StoredFile:
    """Return the file of a row."""
    return StoredFile(**_fields(row))


def response_of(row: RowMapping) -> KeptResponse:
    """Return the response of a row."""
    return KeptResponse(**_fields(row))


def _fields(row: RowMapping) -> dict[str, Any]:
    return {str(name): value for name, value in row.items() if name != "number"}
