"""Who has which catalogue: nobody counts as told by a notification alone, and nobody who is gone is waited for."""

from __future__ import annotations

import pytest

from adapters.catalogue import Catalogue
from adapters.identity import AdapterDigest
from deployments.registry.followers import LEASE_S, Followers

NEW = Catalogue(store="s", revision=5)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("confirmed", "has_it"),
    [
        ([], True),
        ([("s", 5)], True),
        ([("s", 6)], True),
        ([("s", 4)], False),
        ([("another", 9)], False),
        ([("s", 5), ("s", 4)], True),
        ([("another", 9), ("s", 5)], True),
        ([("another", 9), ("s", 4)], False),
        ([("s", 5), ("another", 9)], False),
    ],
)
def test_a_catalogue_is_known_once_its_revision_is_confirmed(confirmed: list[tuple[str, int]], has_it: bool) -> None:
    followers = Followers()
    for store, revision in confirmed:
        followers.confirm("g", store, revision)
    assert followers.have(NEW) == has_it


def test_a_gateway_that_is_gone_is_not_waited_for() -> None:
    clock = Clock()
    followers = Followers(clock=clock)
    followers.confirm("gone", "s", 4)
    clock.now_s += LEASE_S / 2
    followers.confirm("g", "s", 5)
    assert not followers.have(NEW)
    clock.now_s += LEASE_S / 2 + 0.1
    assert followers.have(NEW)
    followers.confirm("g", "s", 4)
    assert followers.have(NEW)


def test_a_gateway_uses_what_it_last_said_until_it_is_gone() -> None:
    clock, adapter = Clock(), AdapterDigest("a")
    followers = Followers(clock=clock)
    followers.confirm("g", "s", 5, frozenset({adapter}))
    followers.confirm("g", "s", 6)
    assert followers.use(adapter, but=["another"])
    assert not followers.use(adapter, but=["g"])
    assert not followers.use(AdapterDigest("b"), but=[])
    followers.confirm("g", "s", 6, frozenset())
    assert not followers.use(adapter, but=[])
    followers.confirm("g", "s", 6, frozenset({adapter}))
    clock.now_s += LEASE_S + 0.1
    assert not followers.use(adapter, but=[])
