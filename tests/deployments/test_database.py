from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from deployments.database import open_database

TABLES = MetaData()
Table("thing", TABLES, Column("number", Integer, primary_key=True))


def test_a_file_is_made_with_its_folder_and_tables_and_opened_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/deeper/things.sqlite"
    for _ in range(2):
        engine = open_database(url, TABLES)
        assert inspect(engine).get_table_names() == ["thing"]
        engine.dispose()


def test_nobody_else_may_read_a_file(tmp_path: Path) -> None:
    """With the usual umask, everybody on the machine could read what tenants had asked and been answered."""
    file = tmp_path / "deeper" / "things.sqlite"
    before = os.umask(0o022)
    try:
        for _ in range(2):
            engine = open_database(f"sqlite:///{file}", TABLES)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
            assert modes == dict.fromkeys(("things.sqlite", "things.sqlite-wal", "things.sqlite-shm"), 0o600)
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            engine.dispose()
            # As an earlier version has made it.
            file.chmod(0o644)
    finally:
        os.umask(before)


def test_what_is_committed_to_sqlite_outlives_a_loss_of_power(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/things.sqlite", TABLES)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2
    engine.dispose()


def test_what_cannot_be_opened_says_so() -> None:
    with pytest.raises(SQLAlchemyError):
        open_database("nonsense://nowhere", TABLES)
