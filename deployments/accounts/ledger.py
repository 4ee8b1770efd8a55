"""Usage records and run-time API keys in a database: SQLite, or anything else that SQLAlchemy opens by URL.

Recording is idempotent: a sender that is unsure whether a record has arrived sends it again. A gateway's own record
takes precedence over a replica's record of an answer whose gateway died, and of several replicas' records, as of one
that was resumed, the one with the most output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    RowMapping,
    Select,
    String,
    Table,
    case,
    func,
    insert,
    select,
    tuple_,
)

from deployments.accounts.values import GATEWAY_LOST, KeyInfo, UsageQuestion, UsageRecord, UsageTotal
from deployments.database import open_database
from deployments.timeline import GOOD_OUTCOMES

_PAGE = 1000

_metadata = MetaData()
_usage = Table(
    "usage",
    _metadata,
    Column("record_id", String(200), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("model", String(200), nullable=False),
    Column("adapter", String(64), nullable=False),
    Column("started_unix_s", Float(53), nullable=False),
    Column("input_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    *(Column(name, Float(53)) for name in ("ttft_s", "tpot_s", "total_s", "queue_s", "device_s")),
    Column("outcome", String(64), nullable=False),
    Index("usage_by_time", "started_unix_s"),
)
_keys = Table(
    "api_key",
    _metadata,
    Column("digest", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("created_unix_s", Float(53), nullable=False),
)


class Ledger:
    """The database; for one thread at a time.

    Args:
        url: SQLAlchemy URL, such as "sqlite:///folder/accounts.sqlite" or "postgresql+psycopg://host/name".

    Raises:
        OSError, sqlalchemy.exc.SQLAlchemyError: the database cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_database(url, _metadata)

    def record(self, records: Sequence[UsageRecord]) -> int:
        """Store the records that are not stored yet; return how many were new.

        Stores them in order, in pages of one transaction each: after an error, a leading part may be stored.
        """
        return sum(self._record_page(records[start : start + _PAGE]) for start in range(0, len(records), _PAGE))

    def _record_page(self, records: Sequence[UsageRecord]) -> int:
        by_id: dict[str, UsageRecord] = {}
        for record in records:
            known = by_id.get(record.record_id)
            if known is None or _replaces(record, known.outcome, known.output_tokens):
                by_id[record.record_id] = record
        c = _usage.c
        with self._engine.begin() as connection:
            asked = select(c.record_id, c.outcome, c.output_tokens).where(c.record_id.in_(by_id))
            stored = connection.execute(asked).all()
            replaced = {i for i, *told in stored if _replaces(by_id[i], *told)}
            if replaced:
                connection.execute(_usage.delete().where(c.record_id.in_(replaced)))
            settled = {i for i, *_ in stored} - replaced
            new = [asdict(record) for i, record in by_id.items() if i not in settled]
            if new:
                connection.execute(insert(_usage), new)
        return len(new) - len(replaced)

    def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        """Add up records by tenant, model and adapter."""
        c = _usage.c
        groups = (c.tenant, c.model, c.adapter)
        statement = _asked(
            select(
                *groups,
                func.count().label("num_requests"),
                func.sum(case((c.outcome.in_(GOOD_OUTCOMES), 0), else_=1)).label("num_failed"),
                func.sum(c.input_tokens).label("input_tokens"),
                func.sum(c.cached_tokens).label("cached_tokens"),
                func.sum(c.output_tokens).label("output_tokens"),
                func.coalesce(func.sum(c.device_s), 0.0).label("device_s"),
                func.avg(c.ttft_s).label("mean_ttft_s"),
                func.avg(c.tpot_s).label("mean_tpot_s"),
            ),
            question,
        )
        return [UsageTotal(**row) for row in self._rows(statement.group_by(*groups).order_by(*groups))]

    def records(self, question: UsageQuestion, *, limit: int, after: UsageRecord | None = None) -> list[UsageRecord]:
        """Return at most `limit` records in order of start, beginning after the record `after`."""
        place = _usage.c.started_unix_s, _usage.c.record_id
        statement = _asked(select(_usage), question).order_by(*place)
        if after is not None:
            statement = statement.where(tuple_(*place) > (after.started_unix_s, after.record_id))
        return [UsageRecord(**row) for row in self._rows(statement.limit(limit))]

    def add_key(self, key: KeyInfo) -> None:
        """Store a key."""
        with self._engine.begin() as connection:
            connection.execute(insert(_keys), [asdict(key)])

    def remove_key(self, digest: str) -> bool:
        """Delete a key; return whether it was known."""
        with self._engine.begin() as connection:
            return connection.execute(_keys.delete().where(_keys.c.digest == digest)).rowcount > 0

    def keys(self) -> list[KeyInfo]:
        """Return all keys."""
        return [KeyInfo(**row) for row in self._rows(select(_keys).order_by(_keys.c.created_unix_s))]

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def _rows(self, statement: Select[Any]) -> Sequence[RowMapping]:
        with self._engine.connect() as connection:
            return connection.execute(statement).mappings().all()


def _replaces(record: UsageRecord, outcome: str, output_tokens: int) -> bool:
    """Return whether a record replaces a known one with this outcome and output."""
    return outcome == GATEWAY_LOST and (record.outcome != GATEWAY_LOST or record.output_tokens > output_tokens)


def _asked(statement: Select[Any], question: UsageQuestion) -> Select[Any]:
    c = _usage.c
    statement = statement.where(c.started_unix_s >= question.since_unix_s, c.started_unix_s < question.until_unix_s)
    if question.tenant is not None:
        statement = statement.where(c.tenant == question.tenant)
    if question.model is not None:
        statement = statement.where(c.model == question.model)
    return statement
