"""Open databases through SQLAlchemy: SQLite, or any other that it opens by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError

from adapters.private_file import make_private, make_private_folder

TROUBLES = (OSError, OperationalError)
"""Errors raised by a full or failing disk: nothing was done, and the operation may be retried."""


def open_database(url: str, tables: MetaData) -> Engine:
    """Open a database and create missing tables. SQLite commits are durable: they are synced to disk.

    Args:
        url: an SQLAlchemy URL, such as "sqlite:///folder/name.sqlite". Such a file is created with its folder if
            missing, both for this process's user only.

    Raises:
        OSError, sqlalchemy.exc.SQLAlchemyError: it cannot be opened.
    """
    parsed = make_url(url)
    engine = create_engine(parsed)
    if parsed.get_backend_name() == "sqlite":
        if (folder := sqlite_folder(url)) is not None:
            make_private_folder(folder)
            # With `uri=true`, SQLite reads the name as a URI of its own.
            if "uri" not in parsed.query:
                make_private(Path(str(parsed.database)))
        event.listen(engine, "connect", _tune_sqlite)
    tables.create_all(engine)
    return engine


def sqlite_folder(url: str) -> Path | None:
    """Return the folder of a URL's SQLite file; None if it has none, or is not a URL at all."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:")
    return Path(str(parsed.database)).parent if is_file else None


def _tune_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
