"""How many bytes the rows of each tenant have: summed up once, which reads every row, and then changed along with them.

with tenant_bytes.changes() as change, database.begin() as connection:
    ...  # delete a row of 10 bytes
    change["blue"] -= 10
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Column, ColumnElement, Connection, func, select
from sqlalchemy.exc import SQLAlchemyError


class TenantBytes:
    """The sums over one table, for one thread at a time. Nobody else may change the table.

    Args:
        tenant: the column with the tenant of a row.
        num_bytes: what a row counts.
    """

    def __init__(self, tenant: Column[str], num_bytes: ColumnElement[int]) -> None:
        self._tenant = tenant
        self._total = select(func.sum(num_bytes))
        self._by_tenant: dict[str, int] = {}

    def of(self, connection: Connection, tenant: str) -> int:
        """Return the bytes of a tenant's rows. The connection must not have changed any of them yet."""
        if tenant not in self._by_tenant:
            total = connection.execute(self._total.where(self._tenant == tenant)).scalar_one()
            self._by_tenant[tenant] = int(total or 0)
        return self._by_tenant[tenant]

    @contextmanager
    def changes(self) -> Iterator[Counter[str]]:
        """Take the changes by tenant that are counted within. Must surround the transaction that makes them."""
        counted: Counter[str] = Counter()
        try:
            yield counted
        except SQLAlchemyError:
            # After a commit that failed nobody knows what is on the disk.
            self._by_tenant.clear()
            raise
        for tenant in counted.keys() & self._by_tenant.keys():
            self._by_tenant[tenant] += counted[tenant]
