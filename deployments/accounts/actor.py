"""The single accounting actor: tenants' limits, usage, and the API keys created while the server runs.

Every gateway asks it to admit requests of tenants with limits, and reports usage to it. The only state that a restart
loses is the one-minute windows, and those only if no external store is configured for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from limits.errors import StorageError

from deployments.accounts.key_book import KeyBook
from deployments.accounts.ledger import Ledger
from deployments.accounts.limiter import Limiter
from deployments.accounts.urls import naming
from deployments.accounts.values import (
    Admission,
    Charge,
    KeyChanges,
    KeyInfo,
    Running,
    TenantLimits,
    UsageQuestion,
    UsageRecord,
    UsageTotal,
)
from deployments.actor_process import begin_actor
from deployments.config import AccountsConfig
from deployments.disk import Disk
from deployments.errors import RETRY_S, UnavailableError

P = ParamSpec("P")
T = TypeVar("T")


class Accounts:
    """The deployment `Accounts`, which has a single replica.

    Raises:
        ConfigError: the store of limits or the database of records cannot be opened.
    """

    def __init__(self, config: AccountsConfig) -> None:
        begin_actor()
        with naming("limits_url", config.limits_url):
            self._limiter = Limiter(config.limits_url)
        with naming("database_url", config.database_url):
            self._ledger = Ledger(config.database_url)
        self._keys = KeyBook(self._ledger.keys())
        # One thread each: neither object is thread-safe, and a slow disk must not delay admission.
        self._limiting = ThreadPoolExecutor(1, thread_name_prefix="limits")
        self._disk = Disk("ledger")

    async def admit(
        self,
        tenant: str,
        limits: TenantLimits,
        gateway: str,
        input_tokens: int,
        num_answers: int,
        running: Running,
        turn: int,
    ) -> Admission:
        """Count a request that is about to begin, or refuse it with the limit it exceeds; see `Limiter.admit`.

        Raises:
            UnavailableError: the store of limits cannot be reached (also raised by `settle`).
        """
        asked = (tenant, limits, gateway, input_tokens)
        return await self._limit(self._limiter.admit, *asked, num_answers=num_answers, running=running, turn=turn)

    async def settle(
        self,
        gateway: str,
        running: Mapping[str, Running],
        charges: Sequence[Charge],
        turn: int,
        number: int,
        keys_version: str,
    ) -> KeyChanges | None:
        """Record a gateway's running answers, count what its answers have used, and return `changed_keys`."""
        await self._limit(self._limiter.hear, gateway, running, charges, turn=turn, number=number)
        return await self.changed_keys(keys_version)

    async def record(self, records: Sequence[UsageRecord]) -> None:
        """Store records; they are on disk when this returns."""
        await self._disk.once(self._ledger.record, records)

    async def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        """Add up records by tenant, model and adapter."""
        return await self._disk.once(self._ledger.totals, question)

    async def records(self, question: UsageQuestion, limit: int, after: UsageRecord | None) -> list[UsageRecord]:
        """Return at most `limit` records in order of start, beginning after the record `after`."""
        return await self._disk.once(self._ledger.records, question, limit=limit, after=after)

    async def add_key(self, digest: str, tenant: str) -> None:
        """Assign a key to a tenant."""
        await self._disk.once(self._add_key, KeyInfo(digest=digest, tenant=tenant, created_unix_s=time.time()))

    async def remove_key(self, digest: str) -> bool:
        """Delete a key; return whether it was known."""
        return await self._disk.once(self._remove_key, digest)

    async def keys(self) -> list[KeyInfo]:
        """Return all keys that were created at run time."""
        return self._keys.all_keys()

    async def changed_keys(self, version: str) -> KeyChanges | None:
        """Return what has changed since this version of the keys, if anything has: gateways ask every second."""
        return self._keys.since(version)

    async def _limit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._limiting, partial(work, *args, **kwargs))
        except StorageError as error:
            message = f"The store of limits cannot be reached: {error.storage_error}"
            raise UnavailableError(message, retry_after_s=RETRY_S) from error

    # One job on the thread each, since the caller may be cancelled at any await.

    def _add_key(self, key: KeyInfo) -> None:
        self._ledger.add_key(key)
        self._keys.put(key)

    def _remove_key(self, digest: str) -> bool:
        is_known = self._ledger.remove_key(digest)
        self._keys.drop(digest)
        return is_known
