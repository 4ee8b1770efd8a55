"""What gateways and the accounts tell each other: limits, quotas, and what a request has used. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

GATEWAY_LOST = "gateway_lost"
"""Outcome of an answer that only the replica can tell of, because its gateway has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may use; None for as much as there is.

    Attributes:
        concurrent_requests: answers under way at once, all gateways together; each choice of a request is one.
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
    """One limit as it stands.

    Attributes:
        resets_in_s: seconds until nothing of it is used.
    """

    limit: int
    remaining: int
    resets_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether a request may begin.

    Attributes:
        refused_by: what it is over: a field of `TenantLimits`, or None where it may begin.
        quotas: by field of `TenantLimits`, those that are counted by the minute.
    """

    refused_by: str | None = None
    retry_after_s: float = 0.0
    quotas: dict[str, Quota] = field(default_factory=dict)


class Charge(NamedTuple):
    """Tokens that a tenant has used."""

    tenant: str
    limits: TenantLimits
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """One answer, as it is paid for. Durations in seconds, None where it never got that far.

    Attributes:
        record_id: unique; a record that comes twice is one.
        adapter: digest of its content, empty for a base model.
        started_unix_s: when the request came.
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
    """Which records are asked for: those that started in [since, until), Unix seconds."""

    since_unix_s: float = 0.0
    until_unix_s: float = float(1 << 53)
    tenant: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """The records of one tenant, model and adapter together."""

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
    """An API key that was made while the server ran; of the key itself only its SHA-256 is known."""

    digest: str
    tenant: str
    created_unix_s: float
