"""Per-minute rate limits of tenants, counted in one place for all gateways with the `limits` library.

A window begins with a tenant's first use and lasts one minute. Requests and input tokens are counted when a request
begins, the latter by an estimate that is corrected when it ends; output tokens when an answer ends: a tenant with any
output tokens left may begin, and the overrun is counted in the window in which the answer ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage, storage_from_string
from limits.strategies import FixedWindowRateLimiter

from deployments.accounts.values import Admission, Charge, Quota, TenantLimits

SILENCE_S = 15.0
"""A gateway silent for this long is considered dead, and its running requests gone."""
FORGET_S = 3600.0
"""Until then, a gateway that was only cut off may send its last charges again, which count once."""
BUSY_RETRY_S = 1.0
WINDOW_S = 60.0
MAX_DRIFT_S = 5.0
"""Between two calls the wall clock and the monotonic clock drift apart by less, unless the wall clock is set."""
WINDOWED = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")


class _Use(NamedTuple):
    """Tokens that count towards one limit; negative if they were counted before and not used."""

    tenant: str
    name: str
    item: RateLimitItemPerMinute
    tokens: int


@dataclass(slots=True)
class _Running:
    """The running requests of one gateway by tenant, as of its latest message, and when it was last heard.

    Attributes:
        number: of its last charges.
        uncounted: of these charges, what could not be counted yet.
    """

    heard_s: float
    turn: int = -1
    number: int = 0
    uncounted: deque[_Use] = field(default_factory=deque)
    count_by_tenant: dict[str, int] = field(default_factory=dict)


class Limiter:
    """Limits of all tenants; for one thread at a time.

    Args:
        storage: URL of the `limits` library, such as "memory://" or "redis://host:6379".
    """

    def __init__(self, storage: str = "memory://", clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage_from_string(storage, wrap_exceptions=True)
        self._strategy = FixedWindowRateLimiter(self._storage)
        self._clock = clock
        self._offset_s = time.time() - clock()
        self._running_by_gateway: dict[str, _Running] = {}

    def admit(
        self,
        tenant: str,
        limits: TenantLimits,
        gateway: str,
        input_tokens: int,
        *,
        num_here: int,
        turn: int,
        num_answers: int = 1,
    ) -> Admission:
        """Count a request that is about to begin, or refuse it with the limit it exceeds.

        Args:
            input_tokens: estimated, of all its answers.
            num_here: the tenant's running answers at the gateway, including those of this request.
            turn: sequence number of the gateway's messages; running counts of a message that arrives late are ignored.

        Raises:
            StorageError: the store cannot be reached.
        """
        self._follow_clock()
        running = self._heard(gateway)
        if turn > running.turn:
            running.turn, running.count_by_tenant[tenant] = turn, num_here
        admission = self._admission(tenant, limits, input_tokens, num_answers)
        if admission.refused_by is not None:
            running.count_by_tenant[tenant] = max(0, running.count_by_tenant.get(tenant, 0) - num_answers)
        return admission

    def _admission(self, tenant: str, limits: TenantLimits, input_tokens: int, num_answers: int) -> Admission:
        if limits.concurrent_requests is not None and self.num_running(tenant) > limits.concurrent_requests:
            return Admission(
                refused_by="concurrent_requests", retry_after_s=BUSY_RETRY_S, quotas=self._quotas(tenant, limits)
            )
        # Output tokens are not known yet: one must be left in the window.
        wanted = dict(zip(WINDOWED, (num_answers, input_tokens, 1), strict=True))
        for name, item in _items(limits).items():
            # A request larger than a whole window is admitted if the window is unused; else it never would be.
            cost = min(wanted[name], item.amount)
            if not self._strategy.test(item, tenant, name, cost=cost):
                quotas = self._quotas(tenant, limits)
                return Admission(refused_by=name, retry_after_s=quotas[name].resets_in_s, quotas=quotas)
        for name, item in _items(limits).items():
            if name != "output_tokens_per_minute":
                self._strategy.hit(item, tenant, name, cost=wanted[name])
        return Admission(quotas=self._quotas(tenant, limits))

    def charge(self, charge: Charge) -> None:
        """Count used tokens against the windows; fewer than none were counted before and not used."""
        for use in _uses(charge):
            self._count(use)

    def hear(
        self,
        gateway: str,
        count_by_tenant: Mapping[str, int],
        charges: Sequence[Charge] = (),
        *,
        turn: int,
        number: int = 0,
    ) -> None:
        """Record a gateway's running requests and count what was used.

        Args:
            turn: as for `admit`.
            number: of the charges, from 1 on; charges that the gateway sends again count once.

        Raises:
            StorageError: the store cannot be reached; the gateway sends the charges again.
        """
        self._follow_clock()
        running = self._heard(gateway)
        if turn > running.turn:
            running.turn, running.count_by_tenant = turn, dict(count_by_tenant)
        if number > running.number:
            running.number = number
            running.uncounted = deque(use for charge in charges for use in _uses(charge))
        while running.uncounted:
            self._count(running.uncounted[0])
            running.uncounted.popleft()

    def num_running(self, tenant: str) -> int:
        """Return a tenant's number of running requests at live gateways."""
        return sum(running.count_by_tenant.get(tenant, 0) for running in self._heard_within(SILENCE_S).values())

    def _count(self, use: _Use) -> None:
        if use.tokens > 0:
            self._strategy.hit(use.item, use.tenant, use.name, cost=use.tokens)
        elif use.tokens < 0:
            key = use.item.key_for(use.tenant, use.name)
            # Not below zero: the window in which they were counted may have ended.
            counted = cast(int, self._storage.get(key))
            self._storage.incr(key, use.item.get_expiry(), -min(-use.tokens, counted))

    def _heard(self, gateway: str) -> _Running:
        if gateway not in self._running_by_gateway:
            self._running_by_gateway = self._heard_within(FORGET_S)
        running = self._running_by_gateway.setdefault(gateway, _Running(self._clock()))
        running.heard_s = self._clock()
        return running

    def _heard_within(self, limit_s: float) -> dict[str, _Running]:
        now_s = self._clock()
        return {
            name: running for name, running in self._running_by_gateway.items() if now_s - running.heard_s <= limit_s
        }

    def _follow_clock(self) -> None:
        """Reset all windows if the wall clock was set: windows in memory expire by it, possibly hours late."""
        offset_s = time.time() - self._clock()
        if abs(offset_s - self._offset_s) > MAX_DRIFT_S and isinstance(self._storage, MemoryStorage):
            self._storage.reset()
        self._offset_s = offset_s

    def _quotas(self, tenant: str, limits: TenantLimits) -> dict[str, Quota]:
        quotas = {}
        for name, item in _items(limits).items():
            resets_at_unix_s, remaining = self._strategy.get_window_stats(item, tenant, name)
            # Stores count in whole seconds and by their own clocks.
            left_s = min(WINDOW_S, max(0.0, resets_at_unix_s - time.time()))
            quotas[name] = Quota(item.amount, max(0, remaining), left_s)
        return quotas


def _uses(charge: Charge) -> Iterator[_Use]:
    used = dict(zip(WINDOWED, (0, charge.input_tokens, charge.output_tokens), strict=True))
    for name, item in _items(charge.limits).items():
        yield _Use(charge.tenant, name, item, used[name])


def _items(limits: TenantLimits) -> dict[str, RateLimitItemPerMinute]:
    amounts = {name: getattr(limits, name) for name in WINDOWED}
    return {name: RateLimitItemPerMinute(amount) for name, amount in amounts.items() if amount is not None}
