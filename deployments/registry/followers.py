"""Which catalogue each gateway has and which adapters its answers use, as far as the registry knows.

A gateway confirms a catalogue when it answers a notification, or by polling with its revision. Notifications over a
Serve handle do not reach every gateway that serves requests: a new one may have read the catalogue before the handle
knows of it, and one that is draining is not in the handle any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from adapters.catalogue import Catalogue
from adapters.identity import AdapterDigest

LEASE_S = 3.0
"""A gateway that has confirmed nothing for this long is gone: it polls every second."""


class _Confirmation(NamedTuple):
    store: str
    revision: int
    at_s: float
    in_use: frozenset[AdapterDigest]


class Followers:
    """The gateways that follow one registry."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_gateway: dict[str, _Confirmation] = {}

    def confirm(self, gateway: str, store: str, revision: int, in_use: frozenset[AdapterDigest] | None = None) -> None:
        """Note that a gateway has this revision of the catalogue; one that was confirmed before may arrive later.

        Args:
            in_use: the adapters of its running answers; None if it did not say.
        """
        last = self._by_gateway.get(gateway)
        if last is not None and last.store == store:
            revision = max(revision, last.revision)
        if in_use is None:
            in_use = frozenset() if last is None else last.in_use
        self._by_gateway[gateway] = _Confirmation(store, revision, self._clock(), in_use)

    def have(self, catalogue: Catalogue) -> bool:
        """Return whether every gateway has this catalogue or a later one; those that are gone are forgotten."""
        self._forget_gone()
        return all(
            last.store == catalogue.store and last.revision >= catalogue.revision for last in self._by_gateway.values()
        )

    def use(self, adapter: AdapterDigest, *, but: Collection[str]) -> bool:
        """Return whether any gateway, `but` some that were asked directly, has answers that use an adapter."""
        self._forget_gone()
        return any(adapter in last.in_use for name, last in self._by_gateway.items() if name not in but)

    def _forget_gone(self) -> None:
        oldest_s = self._clock() - LEASE_S
        self._by_gateway = {name: last for name, last in self._by_gateway.items() if last.at_s >= oldest_s}
