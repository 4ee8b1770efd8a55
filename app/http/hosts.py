"""Decide which names in a request's `Host` header this server accepts.

With DNS rebinding, a malicious page makes its own name resolve to this machine, so that the browser sends the page's
requests here as same-origin requests. The name in `Host` reveals them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
