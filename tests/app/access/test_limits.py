from __future__ import annotations

import pytest

from app.access.limits import check_fits, over_limit, quota_headers
from deployments.accounts.values import Admission, Quota, TenantLimits
from engine.errors import RequestError

QUOTAS = {
    "requests_per_minute": Quota(10, 7, 30.0),
    "input_tokens_per_minute": Quota(1000, 900, 12.3456),
    "output_tokens_per_minute": Quota(500, 20, 1.0),
}


def test_headers_tell_how_every_limit_stands() -> None:
    headers = quota_headers(QUOTAS)
    assert headers["x-ratelimit-limit-requests"] == "10"
    assert headers["x-ratelimit-remaining-input-tokens"] == "900"
    assert headers["x-ratelimit-reset-input-tokens"] == "12.346s"
    # The one that will run out first.
    assert headers["x-ratelimit-remaining-tokens"] == headers["x-ratelimit-remaining-output-tokens"] == "20"
    assert quota_headers({}) == {}


@pytest.mark.parametrize(
    ("refused_by", "kind", "words"),
    [
        ("requests_per_minute", "requests", "5 requests a minute"),
        ("output_tokens_per_minute", "tokens", "5 output tokens a minute"),
        ("concurrent_requests", "requests", "5 requests at once"),
    ],
)
def test_who_is_over_a_limit_is_told_which_and_when_to_come_back(refused_by: str, kind: str, words: str) -> None:
    error = over_limit(Admission(refused_by=refused_by, retry_after_s=12.2, quotas=QUOTAS), 5)
    assert (error.status, error.code, error.error_type) == (429, "rate_limit_exceeded", kind)
    assert 13 <= int(error.headers["retry-after"]) <= 17
    assert words in error.message


@pytest.mark.parametrize("name", ["concurrent_requests", "requests_per_minute"])
def test_more_answers_than_a_limit_ever_lets_through_are_a_mistake(name: str) -> None:
    limits = TenantLimits(**{name: 2})
    check_fits(2, limits, field="n")
    check_fits(100, TenantLimits(input_tokens_per_minute=1), field="n")
    with pytest.raises(RequestError, match="3 answers are more than the limit of 2 requests") as caught:
        check_fits(3, limits, field="n")
    assert caught.value.field == "n"
