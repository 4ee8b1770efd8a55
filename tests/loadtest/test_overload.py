"""An overload that is shorter than a second, against a scripted server that refuses every second request."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from loadtest.measure import Exchange, Slo
from loadtest.overload import Turn, asks, capacity_per_s, held_mb, open_loop, phase_of, summary_of
from loadtest.plots import draw_overload
from loadtest.stream_client import StreamClient
from tests.loadtest.scripted_server import answer, scripted_server

REFUSED = 503, json.dumps({"error": {"message": "later"}}).encode()


def exchange(ttft_ms: float, status: int = 200, error: str | None = None) -> Exchange:
    events = [] if error else [ttft_ms, ttft_ms + 10]
    return Exchange(
        workload="w", model="m", started_s=0, status=status, error=error, event_ms=events, end_ms=ttft_ms + 20
    )


def test_arrivals_come_by_their_rate_whether_or_not_they_are_answered() -> None:
    turns = itertools.count()
    with scripted_server(lambda body: answer(body) if next(turns) % 2 else REFUSED) as host:
        client = StreamClient(host, concurrency=64)
        assert capacity_per_s(client, "base", users=2, seconds=1) > 0
        turn = open_loop(client.ask, asks("base", 1), rate_per_s=100, seconds=1, seed=1)
        client.close()
    assert 50 < len(turn.found) < 150
    assert turn.not_sent == 0
    assert {e.status for e in turn.found} == {200, 503}


def test_goodput_is_what_came_whole_and_in_time() -> None:
    found = [exchange(100), exchange(5000), exchange(3, 503, "later"), exchange(100, 200, "cut")]
    phase = phase_of([Turn(found[:2]), Turn(found[2:])], Slo(ttft_ms=1000), multiple=3.0, seconds=1)
    assert (phase.goodput_per_s, phase.answered_per_s, phase.asked_per_s, phase.cut) == (0.5, 1.0, 2.0, 1)
    assert phase.by_status == {"200": 3, "503": 1}
    assert phase.refusal_p50_ms == 23


def test_the_report_compares_three_times_the_capacity_with_the_peak_and_is_drawn(tmp_path: Path) -> None:
    many = [
        phase_of([Turn([exchange(100)] * n)], Slo(), multiple=multiple, seconds=1)
        for n, multiple in ((10, 1.0), (9, 3.0))
    ]
    report = summary_of(many, 10.0, Slo())
    assert report["goodput_at_3_of_peak"] == 0.9
    assert draw_overload(report["phases"], tmp_path / "overload.png").exists()


def test_memory_is_that_of_a_process_and_what_it_has_started() -> None:
    assert held_mb(os.getpid()) > 1
