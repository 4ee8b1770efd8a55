from __future__ import annotations

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


def test_what_is_committed_to_sqlite_outlives_a_loss_of_power(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/things.sqlite", TABLES)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2
    engine.dispose()


def test_what_cannot_be_opened_says_so() -> None:
    with pytest.raises(SQLAlchemyError):
        open_database("nonsense://nowhere", TABLES)
