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

from deployments.accounts.values import Admission, Charge, Quota, Running, TenantLimits

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
class _Held:
    """A tenant's running answers at one gateway: those that it tells of, and those admitted that it cannot know yet.

    Attributes:
        turn: of the latest message that told of them.
        granted: number of answers admitted by each request for admission, by its turn; all of them are in `told.asked`.
    """

    turn: int
    told: Running = field(default_factory=Running)
    granted: dict[int, int] = field(default_factory=dict)

    def hear(self, told: Running, turn: int) -> None:
        if turn > self.turn:
            self.turn, self.told = turn, told
            # Of the others the gateway knows the outcome: they are among `num_admitted`, or have ended.
            self.granted = {asked: count for asked, count in self.granted.items() if asked in told.asked}

    @property
    def num_running(self) -> int:
        return self.told.num_admitted + sum(self.granted.values())


@dataclass(slots=True)
class _Gateway:
    """What is known of one gateway, and when it was last heard.

    Attributes:
        turn: of its latest message about all tenants; of a tenant that has no entry in `held`, nothing was running.
        number: of its last charges.
        uncounted: of these charges, what could not be counted yet.
    """

    heard_s: float
    turn: int = -1
    number: int = 0
    uncounted: deque[_Use] = field(default_factory=deque)
    held: dict[str, _Held] = field(default_factory=dict)

    def of(self, tenant: str) -> _Held:
        return self.held.setdefault(tenant, _Held(self.turn))


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
        self._gateway_by_name: dict[str, _Gateway] = {}

    def admit(
        self,
        tenant: str,
        limits: TenantLimits,
        gateway: str,
        input_tokens: int,
        *,
        running: Running,
        turn: int,
        num_answers: int = 1,
    ) -> Admission:
        """Count a request that is about to begin, or refuse it with the limit it exceeds.

        Args:
            input_tokens: estimated, of all its answers.
            running: the tenant's answers at the gateway; those of this request are not among `num_admitted`, but its
                turn is in `asked`.
            turn: sequence number of the gateway's messages; what a message that arrives late says of running answers is
                ignored.

        Raises:
            StorageError: the store cannot be reached.
        """
        self._follow_clock()
        held = self._heard(gateway).of(tenant)
        held.hear(running, turn)
        admission = self._admission(tenant, limits, input_tokens, num_answers)
        # The gateway may have given it up meanwhile, as a later message told.
        if admission.refused_by is None and turn in held.told.asked:
            held.granted[turn] = num_answers
        return admission

    def _admission(self, tenant: str, limits: TenantLimits, input_tokens: int, num_answers: int) -> Admission:
        most = limits.concurrent_requests
        if most is not None and self.num_running(tenant) + num_answers > most:
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

    def hear(
        self,
        gateway: str,
        running_by_tenant: Mapping[str, Running],
        charges: Sequence[Charge] = (),
        *,
        turn: int,
        number: int = 0,
    ) -> None:
        """Record a gateway's running answers, of all tenants that have any, and count what was used.

        Args:
            turn: as for `admit`.
            charges: fewer tokens than none were counted before and not used.
            number: of the charges, from 1 on; charges that the gateway sends again count once.

        Raises:
            StorageError: the store cannot be reached; the gateway sends the charges again.
        """
        self._follow_clock()
        heard = self._heard(gateway)
        if turn > heard.turn:
            for tenant in heard.held.keys() | running_by_tenant.keys():
                heard.of(tenant).hear(running_by_tenant.get(tenant, Running()), turn)
            heard.turn = turn
            heard.held = {tenant: held for tenant, held in heard.held.items() if held.told != Running()}
        if number > heard.number:
            heard.number = number
            heard.uncounted = deque(use for charge in charges for use in _uses(charge))
        while heard.uncounted:
            self._count(heard.uncounted[0])
            heard.uncounted.popleft()

    def num_running(self, tenant: str) -> int:
        """Return a tenant's number of running answers at live gateways."""
        living = self._heard_within(SILENCE_S).values()
        return sum(gateway.held[tenant].num_running for gateway in living if tenant in gateway.held)

    def _count(self, use: _Use) -> None:
        if use.tokens > 0:
            self._strategy.hit(use.item, use.tenant, use.name, cost=use.tokens)
        elif use.tokens < 0:
            key = use.item.key_for(use.tenant, use.name)
            # Not below zero: the window in which they were counted may have ended.
            counted = cast(int, self._storage.get(key))
            self._storage.incr(key, use.item.get_expiry(), -min(-use.tokens, counted))

    def _heard(self, name: str) -> _Gateway:
        if name not in self._gateway_by_name:
            self._gateway_by_name = self._heard_within(FORGET_S)
        gateway = self._gateway_by_name.setdefault(name, _Gateway(self._clock()))
        gateway.heard_s = self._clock()
        return gateway

    def _heard_within(self, limit_s: float) -> dict[str, _Gateway]:
        now_s = self._clock()
        return {name: gateway for name, gateway in self._gateway_by_name.items() if now_s - gateway.heard_s <= limit_s}

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
