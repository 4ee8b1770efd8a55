from __future__ import annotations

import logging

import pytest

from engine.gpu.progress import PERIOD_S, Progress


def test_a_bar_is_told_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = 100.0
    progress = Progress("weighing stones", clock=lambda: now_s)
    for done in range(1, 7):
        now_s += PERIOD_S / 2
        progress.reach(done, 6)
    assert caplog.messages == [
        "weighing stones [########................] 2 of 6, 5 s",
        "weighing stones [################........] 4 of 6, 10 s",
        "weighing stones [########################] 6 of 6, 15 s",
    ]


def test_what_is_done_at_once_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress("weighing stones", clock=lambda: 0.0)
    progress.reach(1, 2)
    progress.reach(2, 2)
    assert caplog.messages == ["weighing stones [########################] 2 of 2, 0 s"]
