"""Decide which names in `Host` and which pages in `Origin` this server accepts.

With DNS rebinding, a malicious page makes its own name resolve to this machine, so that the browser sends the page's
requests here as same-origin requests. The name in `Host` reveals them. Without it, the browser still sends a form or an
empty body here for any page and only hides the answer; `Origin` reveals that.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request

from app.http.errors import ApiError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORT = re.compile(r":(80|443)$")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class HostRule:
    """Host names that are accepted.

    Attributes:
        names: in lower case; "*.name" matches every name below it; None accepts anything. Addresses and `localhost`
            are always accepted, because no foreign page can have them as its origin.
    """

    names: frozenset[str] | None = None

    @classmethod
    def of(cls, names: Sequence[str] | None, *, is_open: bool) -> HostRule:
        """Return the rule of a configuration; without names, any is accepted unless the server is open to everybody."""
        if names is None and not is_open:
            return cls()
        return cls(frozenset(name.lower() for name in names or ()))

    def allows(self, header: str) -> bool:
        """Return whether a request with this `Host` is accepted."""
        if self.names is None:
            return True
        matched = _HOST.fullmatch(header)
        if matched is None:
            return False
        name = matched["name"].strip("[]").lower().rstrip(".")
        parents = (f"*.{name[i + 1 :]}" for i, character in enumerate(name) if character == ".")
        return _is_local(name) or name in self.names or any(parent in self.names for parent in parents)


@dataclass(frozen=True, slots=True)
class OriginRule:
    """Origins whose pages may change something.

    Attributes:
        origins: as browsers send them; None accepts anything. The server's own pages are always accepted.
    """

    origins: frozenset[str] | None = None

    @classmethod
    def of(cls, origins: Sequence[str], *, is_open: bool) -> OriginRule:
        """Return the rule of a configuration; where keys are required, a page that has none achieves nothing."""
        return cls(frozenset(origins)) if is_open and "*" not in origins else cls()

    def allows(self, method: str, headers: Headers) -> bool:
        """Return whether a request may come from where it comes from; only browsers send an `Origin`.

        Origins of other schemes are extensions and desktop applications, which their user has installed.
        """
        origin = headers.get("origin")
        if self.origins is None or origin is None or method in _SAFE_METHODS or origin in self.origins:
            return True
        scheme, mark, _ = origin.lower().partition("://")
        if mark and scheme not in ("", "http", "https"):
            return True
        # Browsers say so themselves on secure connections; it holds behind a proxy that changes `Host`, too.
        return headers.get("sec-fetch-site") == "same-origin" or _is_same(origin, headers.get("host", ""))


def check_sender(request: Request, hosts: HostRule, origins: OriginRule) -> None:
    """Refuse a request whose `Host` is there and not accepted, or that a foreign page sends to change something.

    Raises:
        ApiError: 421 or 403.
    """
    # Health checks by HTTP/1.0 have none. Browsers, whose requests a hostile page may send here, always have.
    host = request.headers.get("host")
    if host is not None and not hosts.allows(host):
        raise ApiError(
            421,
            "This server does not answer to the name in 'Host'; 'allowed_hosts' in its configuration may add it.",
            code="host_not_allowed",
        )
    if not origins.allows(request.method, request.headers):
        raise ApiError(
            403,
            "Pages of the origin in 'Origin' may send nothing to this server; 'allowed_origins' in its "
            "configuration may add it.",
            error_type="permission_error",
            code="origin_not_allowed",
        )


def _is_same(origin: str, host: str) -> bool:
    """Return whether both have one host and port; a proxy that ends TLS changes the scheme and its default port."""
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and _DEFAULT_PORT.sub("", place) == _DEFAULT_PORT.sub("", host.lower())


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
