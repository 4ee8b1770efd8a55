"""Overload a running server and measure its goodput.

    python -m loadtest.overload --host http://127.0.0.1:8000 --pid PID --out loadtest/results/overload.json \
        --plot docs/overload.png

First the capacity is measured: `--users` users in a closed loop without pauses, once it runs at full load. Then an open
loop: requests arrive as a Poisson process at multiples of that rate, whether or not earlier ones are answered. Reported
for each multiple: answers per second within the SLO (goodput), refusals and their latency, and the memory of the
process `--pid` and its descendants as proportional set size. The rates alternate, `--rounds` times, so that other load
on the machine affects all alike. If clients and server share a machine, the clients take resources from the server: a
request that is sent late for lack of them is timed from the moment at which it was due.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import gevent  # type: ignore[import-untyped, unused-ignore]
import psutil
from gevent.pool import Pool  # type: ignore[import-untyped, unused-ignore]

from loadtest.arguments import above_0, add_seed, add_slo, at_least_1, http_url, make_folder, slo_of
from loadtest.measure import Exchange, Slo, percentile
from loadtest.plots import draw_overload
from loadtest.report import errors_by_text
from loadtest.servers import NamedUrl, find_server
from loadtest.stream_client import StreamClient
from loadtest.workloads import Ask, ChatMix, chat_asks, read_entries

MULTIPLES = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
MAX_OPEN = 2048
"""Bound on open requests; beyond it requests are not sent (`not_sent` in the report) and the loop is not open."""
DRAIN_S = 60.0
"""Time after the last request in which the open ones may end; what is open then counts as unanswered."""
REFUSALS = (429, 503)
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Results of one arrival rate.

    Attributes:
        multiple: arrival rate as a multiple of the capacity.
        offered_per_s: arrivals, including those that were not sent.
        asked_per_s, asked: without those.
        goodput_per_s: answers within the SLO to requests of the window, divided by its length.
        by_status: number of answers by HTTP status; "0" for none.
        cut: answers with status 200 that are incomplete.
        refusal_p50_ms, refusal_p99_ms: from the moment at which a request was due to its refusal.
        not_sent: requests not sent because `MAX_OPEN` others were open.
        memory_mb: samples of the server's memory over the window, in MiB.
    """

    multiple: float
    offered_per_s: float
    asked_per_s: float
    asked: int
    goodput_per_s: float
    answered_per_s: float
    by_status: dict[str, int]
    cut: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    refusal_p50_ms: float
    refusal_p99_ms: float
    not_sent: int
    memory_mb: list[float]


class Turn(NamedTuple):
    """One run of one arrival rate."""

    found: list[Exchange]
    not_sent: int = 0
    memory_mb: tuple[float, ...] = ()


class Memory(threading.Thread):
    """Samples the memory of a process and its descendants every two seconds; none if `pid` is None."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._has_ended = threading.Event()
        self.samples_mb: list[float] = []

    def run(self) -> None:
        """Sample until `stop`, or until the process ends."""
        while self._pid is not None and psutil.pid_exists(self._pid) and not self._has_ended.wait(2.0):
            self.samples_mb.append(held_mb(self._pid))

    def stop(self) -> list[float]:
        """Stop and return the samples."""
        self._has_ended.set()
        self.join()
        return self.samples_mb


def held_mb(pid: int) -> float:
    """Return the total proportional set size of a process and its descendants, in MiB; 0 if it has ended."""
    try:
        server = psutil.Process(pid)
        processes = [server, *server.children(recursive=True)]
    except psutil.Error:
        return 0.0
    held = 0
    for process in processes:
        try:
            held += process.memory_full_info().pss
        except psutil.Error:
            continue
    return round(held / MEBIBYTE, 1)


def asks(model: str, seed: int | str) -> Iterator[Ask]:
    """Yield requests forever: short conversations about the standard library."""
    return chat_asks(ChatMix(models=(model,)), read_entries(), seed=seed, user=0)


def closed_loop(
    client: StreamClient, model: str, *, users: int, warm_up_s: float, seconds: float, seed: int
) -> list[Exchange]:
    """Let users ask without pauses, and return the exchanges that ended in the `seconds` after the warm-up."""
    starts_s = time.monotonic() + warm_up_s
    found: list[Exchange] = []

    def keep_asking(user: int) -> None:
        for ask in asks(model, f"{seed}/capacity/{user}"):
            exchange = client.ask(ask)
            ended_s = time.monotonic()
            if ended_s >= starts_s + seconds:
                return
            if ended_s >= starts_s:
                found.append(exchange)

    asking = [gevent.spawn(keep_asking, user) for user in range(users)]
    gevent.joinall(asking, timeout=warm_up_s + seconds + DRAIN_S, raise_error=True)
    gevent.killall(asking)
    return found


def why_no_answers(found: list[Exchange], seconds: float) -> str:
    """Say why no exchange of a closed loop of this many seconds was answered: the server's errors, each once."""
    return "; ".join(text for text, _ in errors_by_text(found)) or f"nothing came within {seconds:g} s"


def open_loop(
    ask: Callable[[Ask], Exchange], source: Iterator[Ask], *, rate_per_s: float, seconds: float, seed: str
) -> Turn:
    """Send requests at the times of a Poisson process and return the results, timed from those times."""
    rng, pool, not_sent = random.Random(f"arrivals/{seed}"), Pool(MAX_OPEN), 0
    found: list[Exchange] = []

    def send(asked: Ask, due_s: float) -> None:
        late_ms = (time.monotonic() - due_s) * 1000
        found.append(ask(asked).as_due(late_ms))

    started_s = due_s = time.monotonic()
    while (due_s := due_s + rng.expovariate(rate_per_s)) < started_s + seconds:
        gevent.sleep(max(0.0, due_s - time.monotonic()))
        if pool.free_count():
            pool.spawn(send, next(source), due_s)
        else:
            not_sent += 1
    pool.join(timeout=DRAIN_S)
    pool.kill()
    return Turn(found, not_sent)


def take_turn(client: StreamClient, options: argparse.Namespace, *, rate_per_s: float, seed: str) -> Turn:
    """Run one rate once while sampling the server's memory."""
    memory = Memory(options.pid)
    memory.start()
    turn = open_loop(client.ask, asks(options.model, seed), rate_per_s=rate_per_s, seconds=options.seconds, seed=seed)
    return turn._replace(memory_mb=tuple(memory.stop()))


def phase_of(turns: list[Turn], slo: Slo, *, multiple: float, seconds: float) -> Phase:
    """Summarize the turns of one rate, each `seconds` long."""
    found, seconds = [exchange for turn in turns for exchange in turn.found], seconds * len(turns)
    ttfts = [e.ttft_ms for e in found if e.is_ok and e.ttft_ms is not None]
    refusals = [exchange.end_ms for exchange in found if exchange.status in REFUSALS]
    not_sent = sum(turn.not_sent for turn in turns)
    return Phase(
        multiple=multiple,
        offered_per_s=(len(found) + not_sent) / seconds,
        asked_per_s=len(found) / seconds,
        asked=len(found),
        goodput_per_s=sum(slo.is_met_by(exchange) for exchange in found) / seconds,
        answered_per_s=sum(exchange.is_ok for exchange in found) / seconds,
        by_status={str(status): number for status, number in Counter(e.status for e in found).items()},
        cut=sum(exchange.status == 200 and not exchange.is_ok for exchange in found),
        ttft_p50_ms=percentile(ttfts, 0.5),
        ttft_p99_ms=percentile(ttfts, 0.99),
        refusal_p50_ms=percentile(refusals, 0.5),
        refusal_p99_ms=percentile(refusals, 0.99),
        not_sent=not_sent,
        memory_mb=[held for turn in turns for held in turn.memory_mb],
    )


def json_of(phase: Phase) -> dict[str, Any]:
    """Return a phase as JSON values; None where nothing was measured."""
    values = asdict(phase)
    return {key: None if isinstance(value, float) and isnan(value) else value for key, value in values.items()}


def summary_of(phases: list[Phase], capacity: float, slo: Slo, **facts: object) -> dict[str, Any]:
    """Return the report as JSON values, with facts about the run."""
    peak = max(phase.goodput_per_s for phase in phases)
    at_three = [phase.goodput_per_s for phase in phases if phase.multiple == 3.0]
    return {
        "capacity_per_s": capacity,
        "slo": asdict(slo),
        "cores": os.cpu_count(),
        **facts,
        "goodput_at_3_of_peak": at_three[0] / peak if at_three and peak else None,
        "phases": [json_of(phase) for phase in phases],
    }


def multiples(text: str) -> tuple[float, ...]:
    """Parse numbers above 0, by commas.

    Raises:
        ArgumentTypeError: one is not.
    """
    return tuple(map(above_0, text.split(",")))


def allow_open_connections(count: int) -> None:
    """Raise this process' limit of open files, as far as the system permits: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 100
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overload", description=__doc__)
    parser.add_argument("--host", type=http_url, default="http://127.0.0.1:8000", help="base URL of the running server")
    parser.add_argument("--model", help="name to ask; default: the first base model that the server lists")
    parser.add_argument("--users", type=at_least_1, default=32, help="users who measure the capacity")
    parser.add_argument("--seconds", type=above_0, default=10, help="length of each turn of a rate")
    parser.add_argument("--rounds", type=at_least_1, default=2, help="turns of each rate")
    parser.add_argument("--multiples", type=multiples, default=MULTIPLES, help="of the capacity, by commas")
    add_seed(parser)
    add_slo(parser, Slo(ttft_ms=1000, tpot_ms=100))
    parser.add_argument("--pid", type=int, help="process of the server, for its memory")
    parser.add_argument("--out", type=Path, help="file of the report, JSON")
    parser.add_argument("--plot", type=Path, help="file of the picture, PNG")
    options = parser.parse_args(arguments)
    if options.pid is not None and not psutil.pid_exists(options.pid):
        parser.error(f"--pid: there is no process {options.pid}")
    return options


def main() -> None:
    """Run, write and print."""
    options, load_before = parse(), os.getloadavg()[0]
    for file in filter(None, (options.out, options.plot)):
        make_folder(file.parent)
    allow_open_connections(MAX_OPEN)
    slo = slo_of(options)
    options.model = find_server(NamedUrl(name="the server", url=options.host), options.model).model
    client = StreamClient(options.host, concurrency=MAX_OPEN)
    seconds = options.seconds
    found = closed_loop(
        client, options.model, users=options.users, warm_up_s=seconds / 2, seconds=seconds, seed=options.seed
    )
    capacity = sum(exchange.is_ok for exchange in found) / seconds
    if not capacity:
        raise SystemExit(f"loadtest.overload: nobody at {options.host} answers: {why_no_answers(found, seconds)}")
    print(f"capacity: {capacity:.1f} answers a second", flush=True)
    turns: dict[float, list[Turn]] = {multiple: [] for multiple in options.multiples}
    for number, multiple in enumerate(options.multiples * options.rounds):
        seed = f"{options.seed}/{number}"
        turns[multiple].append(take_turn(client, options, rate_per_s=multiple * capacity, seed=seed))
    phases = [phase_of(turns[multiple], slo, multiple=multiple, seconds=seconds) for multiple in turns]
    facts = {name: getattr(options, name) for name in ("model", "users", "seconds", "rounds", "seed")}
    report = summary_of(phases, capacity, slo, load_before=load_before, **facts)
    for phase in report["phases"]:
        print(json.dumps(phase), flush=True)
    print(f"goodput at 3 times the capacity, of the peak: {report['goodput_at_3_of_peak']}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw_overload(report["phases"], options.plot)


if __name__ == "__main__":
    main()
