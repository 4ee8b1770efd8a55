"""The one actor that counts: limits of tenants, what was used, and the keys that were made while the server runs.

Every gateway asks it before a tenant with limits may begin, and sends it what was used. It keeps nothing in memory that
cannot be lost but the windows of a minute, and those only where no store for them is configured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from limits.errors import ConfigurationError
from sqlalchemy.exc import SQLAlchemyError

from deployments.accounts.ledger import Ledger
from deployments.accounts.limiter import Limiter
from deployments.accounts.values import (
    Admission,
    Charge,
    KeyInfo,
    TenantLimits,
    UsageQuestion,
    UsageRecord,
    UsageTotal,
)
from deployments.actor_process import begin_actor
from deployments.config import AccountsConfig
from deployments.database import TROUBLES
from deployments.disk_trouble import unavailable_on
from engine.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _naming(field: str) -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, SQLAlchemyError, ImportError, OSError) as error:
        # SQLAlchemy's have a second line, which leads to a page of its own.
        raise ConfigError(f"args.accounts.{field}: {str(error).splitlines()[0]}") from error


class Accounts:
    """The deployment `Accounts`; there is one replica of it.

    Raises:
        ConfigError: what counts, or keeps records, cannot be opened.
    """

    def __init__(self, config: AccountsConfig) -> None:
        begin_actor()
        with _naming("limits_url"):
            self._limiter = Limiter(config.limits_url)
        with _naming("database_url"):
            self._ledger = Ledger(config.database_url)
        self._keys = self._ledger.keys()
        # One thread each: neither is for several, and a slow disk must not keep requests from beginning.
        self._limiting = ThreadPoolExecutor(1, thread_name_prefix="limits")
        self._recording = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def admit(
        self, tenant: str, limits: TenantLimits, gateway: str, input_tokens: int, num_here: int, turn: int
    ) -> Admission:
        """Count a request that is about to begin, or say what it is over; see `Limiter.admit`."""
        asked = (tenant, limits, gateway, input_tokens)
        return await _on(self._limiting, self._limiter.admit, *asked, num_here=num_here, turn=turn)

    async def settle(
        self, gateway: str, running: Mapping[str, int], charges: Sequence[Charge], turn: int
    ) -> list[KeyInfo]:
        """Take a gateway's word for what it has under way, count what its answers have used, and tell it the keys."""
        await _on(self._limiting, self._limiter.hear, gateway, running, charges, turn=turn)
        return self._keys

    async def record(self, records: Sequence[UsageRecord]) -> None:
        """Keep records; when this returns they are on the disk."""
        await _on(self._recording, self._ledger.record, records)

    async def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        """Add up records by tenant, model and adapter."""
        return await self._kept(self._ledger.totals, question)

    async def records(self, question: UsageQuestion, limit: int, after: UsageRecord | None) -> list[UsageRecord]:
        """Return records in the order in which they started, from behind one of them on."""
        return await self._kept(self._ledger.records, question, limit=limit, after=after)

    async def add_key(self, digest: str, tenant: str) -> list[KeyInfo]:
        """Let a key be a tenant's; return all keys."""
        key = KeyInfo(digest=digest, tenant=tenant, created_unix_s=time.time())
        await self._kept(self._change_keys, partial(self._ledger.add_key, key))
        return self._keys

    async def remove_key(self, digest: str) -> list[KeyInfo] | None:
        """Forget a key; return all that are left, None where it was not known."""
        is_known = await self._kept(self._change_keys, partial(self._ledger.remove_key, digest))
        return self._keys if is_known else None

    async def keys(self) -> list[KeyInfo]:
        """Return all keys that were made while the server ran."""
        return self._keys

    def _change_keys(self, change: Callable[[], T]) -> T:
        """Change keys, and read them anew; in one go of the thread, for who asked may be cancelled in between."""
        changed = change()
        self._keys = self._ledger.keys()
        return changed

    async def _kept(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask the ledger what somebody waits for."""
        with unavailable_on(*TROUBLES):
            return await _on(self._recording, work, *args, **kwargs)


async def _on(executor: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, partial(work, *args, **kwargs))
