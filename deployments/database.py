"""Open databases through SQLAlchemy: SQLite, or any other that it opens by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

TROUBLES = (OSError, OperationalError)
"""Errors raised by a full or failing disk: nothing was done, and the operation may be retried."""


def open_database(url: str, tables: MetaData) -> Engine:
    """Open a database and create missing tables. SQLite commits are durable: they are synced to disk.

    Args:
        url: an SQLAlchemy URL, such as "sqlite:///folder/name.sqlite", whose folder is created if missing.

    Raises:
        OSError, sqlalchemy.exc.SQLAlchemyError: it cannot be opened.
    """
    parsed = make_url(url)
    engine = create_engine(parsed)
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        event.listen(engine, "connect", _tune_sqlite)
    tables.create_all(engine)
    return engine


def _tune_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
