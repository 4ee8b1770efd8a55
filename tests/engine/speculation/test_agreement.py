from __future__ import annotations

import pytest

from adapters.identity import AdapterDigest
from engine.speculation import agreement
from engine.speculation.agreement import FIRST, Agreement

A, B = AdapterDigest("a"), AdapterDigest("b")


def test_each_adapter_has_its_own_rate_which_is_forgotten_slowly() -> None:
    known = Agreement()
    assert known.first(A) == known.first(None) == FIRST
    for _ in range(200):
        known.learn(A, 0.1)
    assert known.first(A) == pytest.approx(0.1, abs=0.05)
    assert known.first(None) == FIRST
    # Nothing is guessed for it any more; some answers later, it is tried again.
    rates = [known.first(A) for _ in range(100)]
    assert rates == sorted(rates)
    assert rates[-1] > 0.6


def test_what_was_asked_for_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_ADAPTERS", 2)
    known = Agreement()
    for adapter in (A, B):
        known.first(adapter)
        known.learn(adapter, 0.0)
    low = known.first(A)
    assert low < FIRST
    known.first(None)
    known.learn(B, 0.0)
    assert known.first(B) == FIRST
    assert known.first(B) == FIRST
