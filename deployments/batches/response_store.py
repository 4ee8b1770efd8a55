"""Responses that are kept, so that later requests can continue them. Each row has what its own request brought."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, Select, delete, func, insert, select

from deployments.batches.tables import response_of, responses
from deployments.batches.tenant_bytes import TenantBytes
from deployments.batches.values import KeptResponse
from deployments.config import BatchesConfig
from engine.errors import RequestError

MAX_READ_BYTES, MAX_CONVERSATION = 32_000_000, 4096
"""Bounds on what one request reads, in bytes and responses: more than any context holds."""
MAX_DROPPED = 1000
"""How many are deleted at once: others wait meanwhile."""

_BYTES = func.length(responses.c.input_items) + func.length(responses.c.body)


class _Read:
    """What one request reads."""

    def __init__(self, field: str) -> None:
        self.responses: list[KeptResponse] = []
        self._num_bytes = 0
        self._field = field

    def add(self, response: KeptResponse) -> None:
        self.responses.append(response)
        self._num_bytes += _num_bytes(response)
        if self._num_bytes > MAX_READ_BYTES or len(self.responses) > MAX_CONVERSATION:
            words = f"takes more than {MAX_READ_BYTES} bytes, or {MAX_CONVERSATION} responses, of what is stored."
            raise RequestError.about(self._field, words, code="context_length_exceeded")


class ResponseStore:
    """The responses in a database, for one thread at a time.

    Args:
        clock: returns Unix seconds.
    """

    def __init__(self, database: Engine, config: BatchesConfig, clock: Callable[[], float]) -> None:
        self._database = database
        self._config = config
        self._clock = clock
        self._tenant_bytes = TenantBytes(responses.c.tenant, _BYTES)

    def keep(self, response: KeptResponse) -> None:
        """Store a response; the tenant's oldest are dropped if there are too many bytes. Repeating it is harmless."""
        tenant = response.tenant
        with self._tenant_bytes.changes() as change, self._database.begin() as connection:
            if self._find(connection, tenant, response.response_id) is None:
                used = self._tenant_bytes.of(connection, tenant) + _num_bytes(response)
                connection.execute(insert(responses), [asdict(response)])
                dropped = self._drop_oldest(connection, tenant, used - self._config.max_response_bytes)
                change[tenant] += _num_bytes(response) - dropped

    def one(self, tenant: str, response_id: str) -> KeptResponse:
        """Return a response of a tenant.

        Raises:
            RequestError: the tenant has no such response.
        """
        with self._database.connect() as connection:
            return self._one(connection, tenant, response_id)

    def several(self, tenant: str, response_ids: Collection[str]) -> list[KeptResponse]:
        """Return those of the responses that the tenant has; SQLite takes some thousands of ids.

        Raises:
            RequestError: they have too many bytes.
        """
        chosen = self._current(tenant).where(responses.c.response_id.in_(response_ids))
        found = _Read(field="input")
        with self._database.connect() as connection:
            for row in connection.execute(chosen).mappings():
                found.add(response_of(row))
        return found.responses

    def conversation(self, tenant: str, response_id: str) -> list[KeptResponse]:
        """Return a response of a tenant and all that it continues, oldest first.

        Raises:
            RequestError: one of them is not kept, or they are too many or have too many bytes.
        """
        found = _Read(field="previous_response_id")
        next_id: str | None = response_id
        with self._database.connect() as connection:
            while next_id is not None:
                response = self._find(connection, tenant, next_id)
                if response is None:
                    raise _broken(response_id, is_known=bool(found.responses))
                found.add(response)
                next_id = response.previous_id
        return found.responses[::-1]

    def forget(self, tenant: str, response_id: str) -> None:
        """Delete a response of a tenant.

        Raises:
            RequestError: the tenant has no such response.
        """
        with self._tenant_bytes.changes() as change, self._database.begin() as connection:
            change[tenant] -= _num_bytes(self._one(connection, tenant, response_id))
            connection.execute(delete(responses).where(responses.c.response_id == response_id))

    def drop_expired(self) -> None:
        """Delete expired responses, at most `MAX_DROPPED`."""
        chosen = select(responses.c.number).where(responses.c.created_s <= self._oldest_s()).limit(MAX_DROPPED)
        dropping = delete(responses).where(responses.c.number.in_(chosen)).returning(responses.c.tenant, _BYTES)
        with self._tenant_bytes.changes() as change, self._database.begin() as connection:
            for tenant, num_bytes in connection.execute(dropping):
                change[tenant] -= num_bytes

    def _one(self, connection: Connection, tenant: str, response_id: str) -> KeptResponse:
        response = self._find(connection, tenant, response_id)
        if response is None:
            message = f"Response with id '{response_id[:128]}' not found."
            raise RequestError(message, field="response_id", code="response_not_found")
        return response

    def _find(self, connection: Connection, tenant: str, response_id: str) -> KeptResponse | None:
        chosen = self._current(tenant).where(responses.c.response_id == response_id)
        row = connection.execute(chosen).mappings().one_or_none()
        return None if row is None else response_of(row)

    def _current(self, tenant: str) -> Select[Any]:
        c = responses.c
        return select(responses).where(c.tenant == tenant, c.created_s > self._oldest_s())

    def _oldest_s(self) -> float:
        return self._clock() - (self._config.responses_last_s or 0)

    def _drop_oldest(self, connection: Connection, tenant: str, num_bytes: int) -> int:
        """Delete a tenant's oldest responses until they had so many bytes; return how many they had."""
        c = responses.c
        dropped, num_dropped = [], 0
        if num_bytes > 0:
            oldest = select(c.number, _BYTES).where(c.tenant == tenant).order_by(c.number).limit(MAX_DROPPED)
            for number, size in connection.execute(oldest):
                if num_dropped >= num_bytes:
                    break
                dropped.append(number)
                num_dropped += size
            connection.execute(delete(responses).where(c.number.in_(dropped)))
        return num_dropped


def _num_bytes(response: KeptResponse) -> int:
    return len(response.input_items) + len(response.body)


def _broken(response_id: str, *, is_known: bool) -> RequestError:
    message = f"Previous response with id '{response_id[:128]}' not found."
    if is_known:
        message = f"A response that '{response_id[:128]}' continues was deleted, or has expired."
    return RequestError(message, field="previous_response_id", code="previous_response_not_found")
