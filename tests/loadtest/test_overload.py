"""An overload that is shorter than a second, against a scripted server that refuses every second request."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest import overload
from loadtest.measure import Exchange, Slo
from loadtest.overload import (
    Turn,
    allow_open_connections,
    asks,
    closed_loop,
    held_mb,
    main,
    open_loop,
    parse,
    phase_of,
    summary_of,
    why_no_answers,
)
from loadtest.plots import draw_overload
from loadtest.stream_client import StreamClient
from loadtest.workloads import Ask
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
        turn = open_loop(client.ask, asks("base", 1), rate_per_s=100, seconds=1, seed="1")
        client.close()
    assert 50 < len(turn.found) < 150
    assert turn.not_sent == 0
    assert {e.status for e in turn.found} == {200, 503}


def test_the_capacity_is_that_of_full_load_with_new_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began with an idle server, and with the questions that a warm-up had left in its cache."""
    now_s, asked = 0.0, []

    class Client:
        def ask(self, ask: Ask) -> Exchange:
            nonlocal now_s
            now_s += 1
            asked.append(json.dumps(ask.body))
            return exchange(now_s)

    monkeypatch.setattr("loadtest.overload.time.monotonic", lambda: now_s)
    found = closed_loop(Client(), "base", users=1, warm_up_s=3, seconds=4, seed=1)  # type: ignore[arg-type]
    assert [one.ttft_ms for one in found] == [3, 4, 5, 6]
    closed_loop(Client(), "base", users=1, warm_up_s=3, seconds=4, seed=2)  # type: ignore[arg-type]
    assert len(set(asked)) == len(asked)


def test_every_run_asks_other_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run had the questions of the first in the server's cache, and found a capacity 40% higher."""
    asked: list[str] = []

    def open_loop(_ask: object, source: Iterator[Ask], **_options: object) -> Turn:
        asked.append(json.dumps(next(source).body))
        return Turn([exchange(1)])

    monkeypatch.setattr(overload, "find_server", lambda *_: SimpleNamespace(model="base"))
    monkeypatch.setattr(overload, "closed_loop", lambda *_, **options: [exchange(options["seed"])])
    monkeypatch.setattr(overload, "open_loop", open_loop)
    for line in ("", "", "--seed 5", "--seed 5"):
        monkeypatch.setattr("sys.argv", ["overload", "--multiples", "1,2", "--rounds", "1", *line.split()])
        main()
    assert asked[4:6] == asked[6:]
    assert len(set(asked)) == 6


def test_the_report_says_how_it_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(overload, "find_server", lambda *_: SimpleNamespace(model="base"))
    monkeypatch.setattr(overload, "closed_loop", lambda *_, **_options: [exchange(1)])
    monkeypatch.setattr(overload, "open_loop", lambda *_, **_options: Turn([exchange(1)]))
    line = f"--users 3 --seconds 4 --rounds 2 --seed 5 --multiples 1 --out {tmp_path / 'out.json'}"
    monkeypatch.setattr("sys.argv", ["overload", *line.split()])
    main()
    facts = {"model": "base", "users": 3, "seconds": 4, "rounds": 2, "seed": 5}
    assert facts.items() <= json.loads((tmp_path / "out.json").read_text()).items()


def test_what_could_not_be_sent_is_part_of_the_arrivals() -> None:
    """At ten times the capacity the report had a quarter less, and did not say so."""
    phase = phase_of([Turn([exchange(1)] * 3, 1), Turn([exchange(1)] * 4)], Slo(), multiple=10.0, seconds=2)
    assert (phase.offered_per_s, phase.asked_per_s, phase.not_sent) == (2.0, 1.75, 1)


def test_a_request_that_is_sent_late_is_timed_from_when_it_was_due() -> None:
    """A client at its limit sent the requests of one second in four, and took their answers for those of one second."""

    def ask_slowly(_ask: Ask) -> Exchange:
        time.sleep(0.02)
        return exchange(0)

    turn = open_loop(ask_slowly, asks("base", 1), rate_per_s=200, seconds=0.2, seed="1")
    least_ms = (len(turn.found) - 1) * 20 - 200
    assert least_ms > 100
    assert max(one.event_ms[0] for one in turn.found) > least_ms
    assert max(one.end_ms for one in turn.found) > least_ms


def test_a_request_that_is_never_answered_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were open when the time was up vanished, as if they had not been asked."""
    monkeypatch.setattr("loadtest.overload.DRAIN_S", 0.1)
    is_over = threading.Event()

    def script(_body: dict[str, object]) -> list[bytes]:
        is_over.wait(30)
        return []

    with scripted_server(script) as host:
        client = StreamClient(host, concurrency=64)
        turn = open_loop(client.ask, asks("base", 1), rate_per_s=50, seconds=0.2, seed="1")
        is_over.set()
        client.close()
    assert turn.found
    phase = phase_of([turn], Slo(), multiple=1.0, seconds=0.2)
    assert (phase.asked, phase.by_status, phase.goodput_per_s) == (len(turn.found), {"0": len(turn.found)}, 0)


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
    report = summary_of(many, 10.0, Slo(), load_before=0.5)
    assert (report["goodput_at_3_of_peak"], report["load_before"]) == (0.9, 0.5)
    assert report["phases"][0]["refusal_p50_ms"] is None, "NaN is no JSON"
    assert "NaN" not in json.dumps(report)
    assert draw_overload(report["phases"], tmp_path / "overload.png").exists()


def test_memory_is_that_of_a_process_and_what_it_has_started() -> None:
    assert held_mb(os.getpid()) > 1


def test_every_open_request_may_have_a_connection() -> None:
    """With a limit of 1,024 open files, others failed in the client and were counted as the server's failures."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
        allow_open_connections(400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, limits[1])
        allow_open_connections(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_has_ended_holds_nothing() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert held_mb(ended.pid) == 0


@pytest.mark.parametrize("line", ["--seconds 0", "--multiples 1,0", "--multiples a", "--pid 99999999", "--host h:1"])
def test_nonsense_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(line.split())
    assert line.split()[0] in capsys.readouterr().err


def test_a_server_that_refuses_everybody_is_quoted() -> None:
    with scripted_server(lambda _: REFUSED) as host:
        client = StreamClient(host, concurrency=1)
        found = [client.ask(next(asks("base", 1))) for _ in range(2)]
        client.close()
    assert why_no_answers(found, 1.0) == "HTTP 503: later"
    assert why_no_answers([], 1.5) == "nothing came within 1.5 s"


def test_no_capacity_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many come in time is the machine's to say; that none is answered, or none comes, ends the measuring."""
    with scripted_server(lambda _: REFUSED) as host:
        monkeypatch.setattr("sys.argv", ["overload", "--host", host, "--seconds", "0.2", "--users", "2"])
        with pytest.raises(SystemExit, match=f"nobody at {host} answers: "):
            main()
