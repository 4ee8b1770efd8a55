"""Opens databases by SQLAlchemy: SQLite, or whatever else it opens by a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

TROUBLES = (OSError, OperationalError)
"""What a full or failing disk raises: nothing was done, and the same may be tried again."""


def open_database(url: str, tables: MetaData) -> Engine:
    """Open a database and make the tables that it lacks; what is committed is on the disk.

    Args:
        url: of SQLAlchemy, such as "sqlite:///folder/name.sqlite", whose folder is made where it is not there.

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
