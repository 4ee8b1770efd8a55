"""Pages of the lists of files and batches, and the places of deleted files, from which a list can still be read on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine, RowMapping, Select, delete, insert, literal, select

from deployments.batches.tables import batches, deleted_files, files
from deployments.batches.values import UNFINISHED, Page, PageQuestion
from engine.errors import RequestError

T = TypeVar("T")

PLACE_LASTS_S = 86_400
"""How long the place of a deleted file is known: longer than any client takes from one page to the next."""

MAX_ENDED = 10_000
"""How many ended batches of a tenant are kept."""
MAX_FORGOTTEN = 1000
"""How many are forgotten at once: others wait meanwhile."""


def read_page(
    engine: Engine,
    statement: Select[Any],
    item_id: Column[str],
    value_of: Callable[[RowMapping], T],
    tenant: str,
    question: PageQuestion,
) -> Page[T]:
    """Return a page of a tenant's rows, as values.

    Args:
        statement: selects rows of the table of `item_id`, of any tenant and in any order.

    Raises:
        RequestError: `after` neither is nor was one of them.
    """
    c = item_id.table.c
    order = c.number.asc() if question.is_ascending else c.number.desc()
    statement = statement.where(c.tenant == tenant).order_by(order).limit(question.limit + 1)
    with engine.connect() as connection:
        if question.after is not None:
            place = _place(connection, item_id, tenant, question.after)
            if place is None:
                raise RequestError(f"There is no '{question.after[:128]}' in the list.", field="after")
            statement = statement.where(c.number > place if question.is_ascending else c.number < place)
        rows = connection.execute(statement).mappings().all()
    return Page(items=tuple(map(value_of, rows[: question.limit])), has_more=len(rows) > question.limit)


def delete_rows(connection: Connection, file_ids: Collection[str], now_s: float) -> None:
    """Delete rows of files and keep their places: a client may delete the files of a page before it asks for the next.

    Places that have been kept for `PLACE_LASTS_S` are forgotten.
    """
    c = files.c
    chosen = c.file_id.in_(file_ids)
    rows = select(c.number, c.file_id, c.tenant, literal(int(now_s))).where(chosen)
    connection.execute(insert(deleted_files).from_select(["number", "file_id", "tenant", "deleted_s"], rows))
    connection.execute(delete(files).where(chosen))
    connection.execute(delete(deleted_files).where(deleted_files.c.deleted_s <= now_s - PLACE_LASTS_S))


def forget_ended(connection: Connection, tenant: str) -> None:
    """Delete a tenant's ended batches but the newest `MAX_ENDED`; their outputs are files, which stay."""
    c = batches.c
    ended = select(c.number).where(c.tenant == tenant, c.status.not_in(UNFINISHED)).order_by(c.number.desc())
    connection.execute(delete(batches).where(c.number.in_(ended.offset(MAX_ENDED).limit(MAX_FORGOTTEN))))


def _place(connection: Connection, item_id: Column[str], tenant: str, after: str) -> int | None:
    for column in (item_id, deleted_files.c.file_id) if item_id.table is files else (item_id,):
        c = column.table.c
        statement = select(c.number).where(column == after, c.tenant == tenant)
        place: int | None = connection.execute(statement).scalar_one_or_none()
        if place is not None:
            return place
    return None
