from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from app.access.admin import check_admin
from app.access.tenants import key_digest
from app.http.errors import ApiError

DIGEST = key_digest("secret")


@pytest.mark.parametrize("value", ["Bearer secret", "bearer  secret "])
def test_the_key_opens(value: str) -> None:
    check_admin(Headers({"authorization": value}), DIGEST)


@pytest.mark.parametrize(
    ("headers", "digest", "status"),
    [
        ({}, DIGEST, 401),
        ({"authorization": "Bearer "}, DIGEST, 401),
        ({"authorization": "Bearer wrong"}, DIGEST, 401),
        ({"authorization": "Basic secret"}, DIGEST, 401),
        ({"authorization": f"Bearer {DIGEST}"}, DIGEST, 401),
        ({"authorization": "Bearer secret"}, None, 403),
        ({}, key_digest(""), 401),
    ],
)
def test_nothing_else_does(headers: dict[str, str], digest: str | None, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        check_admin(Headers(headers), digest)
    assert refused.value.status == status
