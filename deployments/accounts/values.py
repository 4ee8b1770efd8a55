"""Values exchanged between gateways and the accounts: limits, quotas and usage. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

GATEWAY_LOST = "gateway_lost"
"""Outcome of an answer recorded by the replica because its gateway died."""
OF_BATCHES = " (batches)"
"""Follows the name of a tenant whose batches are counted apart for its limits; no name of a tenant has a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of a tenant; None means unlimited.

    Attributes:
        concurrent_requests: answers running at once across all gateways; each choice of a request counts as one.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def has_any(self) -> bool:
        """Whether anything is limited."""
        return self != TenantLimits()


class Quota(NamedTuple):
    """The current state of one limit.

    Attributes:
        resets_in_s: seconds until the window ends.
    """

    limit: int
    remaining: int
    resets_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether a request may begin.

    Attributes:
        refused_by: the exceeded limit, a field of `TenantLimits`, or None if the request is admitted.
        quotas: the per-minute limits by field of `TenantLimits`.
        is_counted: whether its prompt counts towards the limits; not if it could not be checked.
    """

    refused_by: str | None = None
    retry_after_s: float = 0.0
    quotas: dict[str, Quota] = field(default_factory=dict)
    is_counted: bool = True


class Running(NamedTuple):
    """A tenant's answers at one gateway, as of one of its messages.

    Attributes:
        num_admitted: answers that the gateway knows to be admitted, and that have not ended.
        asked: turns of the gateway's requests for admission whose outcome it does not know yet.
    """

    num_admitted: int = 0
    asked: frozenset[int] = frozenset()


class Charge(NamedTuple):
    """Tokens that a tenant has used; `input_tokens` beyond those that admission counted, negative if it was fewer."""

    tenant: str
    limits: TenantLimits
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """The billable usage of one answer. Durations are in seconds, None if the answer never got that far.

    Attributes:
        record_id: unique; repeated records count once.
        adapter: digest of the adapter's content, empty for a base model.
        started_unix_s: arrival time of the request.
        outcome: a finish reason, the type of an error, "cancelled", or "gateway_lost".
    """

    record_id: str
    tenant: str
    model: str
    adapter: str
    started_unix_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None
    queue_s: float | None = None
    device_s: float | None = None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuestion:
    """A filter of records: those that started in [since, until), Unix seconds."""

    since_unix_s: float = 0.0
    until_unix_s: float = float(1 << 53)
    tenant: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """The totals over the records of one tenant, model and adapter."""

    tenant: str
    model: str
    adapter: str
    num_requests: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    device_s: float
    mean_ttft_s: float | None
    mean_tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """An API key created at run time; only its SHA-256 is stored."""

    digest: str
    tenant: str
    created_unix_s: float


class KeyChanges(NamedTuple):
    """What a gateway needs to learn of the keys created at run time.

    Attributes:
        version: of the keys with these changes; another one after each change, and for each process of the accounts.
        is_whole: whether these are all keys, rather than changes.
        tenant_by_key: tenant of each key by its digest; None for one that was deleted.
    """

    version: str
    is_whole: bool
    tenant_by_key: dict[str, str | None]
