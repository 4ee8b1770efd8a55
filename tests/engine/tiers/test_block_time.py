"""The expected time of a block; `test_mover` has it learn from fetches."""

from __future__ import annotations

import pytest

from engine.tiers.block_time import HALVING_S, MAX_SURPRISE, NEW_SHARE, BlockTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def test_nothing_is_expected_before_the_first_measurement(clock: list[float]) -> None:
    assert BlockTime().expected_s == 0.0


def test_what_was_measured_is_halved_in_time(clock: list[float]) -> None:
    block_time = BlockTime()
    block_time.learn(2.0)
    clock[0] = HALVING_S
    assert block_time.expected_s == pytest.approx(1.0)


def test_a_surprise_counts_as_a_few_times_what_was_expected(clock: list[float]) -> None:
    block_time = BlockTime()
    for block_s in (1.0, 1000.0):
        block_time.learn(block_s)
    assert block_time.expected_s == pytest.approx(1.0 - NEW_SHARE + NEW_SHARE * MAX_SURPRISE)
