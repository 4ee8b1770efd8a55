"""Who may change what is served: whoever knows the admin key. Only its digest is kept."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers

from app.access.tenants import given_key, key_digest, wrong_key
from app.http.errors import ApiError

ADMIN_KEY_VARIABLE = "ANTIPHON_ADMIN_KEY"


def is_admin(headers: Headers, admin_key_sha256: str | None) -> bool:
    """Whether a request brings the admin key."""
    key = given_key(headers)
    if key is None or admin_key_sha256 is None:
        return False
    return hmac.compare_digest(key_digest(key), admin_key_sha256)


def check_admin(headers: Headers, admin_key_sha256: str | None) -> None:
    """Do nothing where a request brings the admin key, as `Authorization: Bearer ...`.

    Raises:
        ApiError: 403 where this server has none, 401 where the request brings none, or another one.
    """
    if admin_key_sha256 is None:
        raise ApiError(
            403,
            f"This server has no admin key: set {ADMIN_KEY_VARIABLE} where it is started, or 'admin_key_sha256'.",
            error_type="permission_error",
            code="admin_disabled",
        )
    if not is_admin(headers, admin_key_sha256):
        raise wrong_key("This route needs the admin key, as 'Authorization: Bearer ...'.")
