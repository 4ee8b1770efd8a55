"""Which names in a request's `Host` this server answers to.

A browser that visits a page of a stranger can be made to take the stranger's name for this machine (DNS rebinding), and
then sends the page's requests here as if they were its own. The name in `Host` gives them away.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class HostRule:
    """Names that are answered to.

    Attributes:
        names: in lower case; "*.name" stands for every name under it; None for whatever comes. Addresses and
            `localhost` are always answered to: no stranger's page can bear them.
    """

    names: frozenset[str] | None = None

    @classmethod
    def of(cls, names: Sequence[str] | None, *, is_open: bool) -> HostRule:
        """Return the rule of a configuration; without names a server answers to all, unless it is open to everybody."""
        if names is None and not is_open:
            return cls()
        return cls(frozenset(name.lower() for name in names or ()))

    def allows(self, header: str) -> bool:
        """Tell whether a request with this `Host` is answered."""
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
