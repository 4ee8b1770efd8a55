"""Tenant limits in HTTP: OpenAI's `x-ratelimit-*` headers, and the 429."""

from __future__ import annotations

from collections.abc import Mapping

from app.http.errors import ApiError, retry_after
from deployments.accounts.values import Admission, Quota, TenantLimits
from engine.errors import RequestError

_WORDS_BY_LIMIT = {
    "requests_per_minute": "requests a minute",
    "input_tokens_per_minute": "input tokens a minute",
    "output_tokens_per_minute": "output tokens a minute",
    "concurrent_requests": "requests at once",
}


def quota_headers(quotas: Mapping[str, Quota]) -> dict[str, str]:
    """Return the rate limit headers; `tokens` is whichever of input and output has less remaining."""
    headers: dict[str, str] = {}
    for name, quota in quotas.items():
        headers |= _headers(name.removesuffix("_per_minute").replace("_", "-"), quota)
    tokens = [quota for name, quota in quotas.items() if "tokens" in name]
    if tokens:
        headers |= _headers("tokens", min(tokens, key=lambda quota: quota.remaining))
    return headers


def check_fits(count: int, limits: TenantLimits, *, field: str) -> None:
    """Refuse a request with more answers than a limit can ever admit; each answer counts as one request.

    Raises:
        RequestError: the request has more answers than a limit.
    """
    for name in ("concurrent_requests", "requests_per_minute"):
        most = getattr(limits, name)
        if most is not None and count > most:
            raise RequestError(
                f"{count} answers are more than the limit of {most} {_WORDS_BY_LIMIT[name]}.", field=field
            )


def over_limit(admission: Admission, limit: int) -> ApiError:
    """Return the 429 for a tenant that is over a limit."""
    assert admission.refused_by is not None
    wait_s = retry_after(admission.retry_after_s)
    return ApiError(
        429,
        f"The limit of {limit} {_WORDS_BY_LIMIT[admission.refused_by]} is reached; try again in {wait_s} s.",
        error_type="tokens" if "tokens" in admission.refused_by else "requests",
        code="rate_limit_exceeded",
        headers={"retry-after": str(wait_s)} | quota_headers(admission.quotas),
    )


def _headers(suffix: str, quota: Quota) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{suffix}": str(quota.limit),
        f"x-ratelimit-remaining-{suffix}": str(quota.remaining),
        f"x-ratelimit-reset-{suffix}": f"{quota.resets_in_s:.3f}s",
    }
