"""Load a running server for a long time while its processes are killed, and check every answer.

    python -m loadtest.soak --url http://127.0.0.1:8000 --minutes 20 --streams 8 --kill Model- --kill Gateway

Each question is asked once before anything is killed; every later answer must be identical. Half of the questions are
greedy, half sampled with a seed. Serve in float32, where rounding does not depend on the other requests of a batch.
Every minute one process of this machine whose command line contains one of the names is killed. The last line is one
JSON object. The status is 1 if an answer was different, cut in silence, or failed after its end, or if the last answer
of every stream, half a minute or more after the last kill, is incomplete.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import ssl
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from loadtest.arguments import above_0, at_least_1, http_url
from loadtest.measure import percentile
from loadtest.stream_client import headers_for

NUM_QUESTIONS = 16
SLOW_S = 120.0
PERIOD_S, MENDING_S = 60.0, 30.0
WRONG = ("different", "cut in silence", "failed after its end")
"""Verdicts that no client can tell from a good answer."""
COMPLETE = ("same", "different")
"""Verdicts on an answer that came to its end; a refusal takes no time, and would make the others look fast."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer: its text, whether it had a finish reason, its error if any, and its duration."""

    text: str
    is_done: bool
    error: str | None
    took_s: float


def question(model: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Return one of the questions; odd ones are sampled."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    return drawn | {
        "model": model,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": f"What does os.path.join do, and what is {number}?"}],
    }


def ask(client: httpx.Client, body: dict[str, Any]) -> Heard:
    """Ask once, without retry."""
    started_s, text, is_done, error = time.monotonic(), "", False, None
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                error = f"status {response.status_code}"
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]" or error:
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("error"):
                    error = "error event"
                    continue
                for choice in chunk.get("choices") or ():
                    text += choice["delta"].get("content") or ""
                    is_done = is_done or choice.get("finish_reason") is not None
    except httpx.HTTPError as failure:
        error = type(failure).__name__
    except (ValueError, LookupError, TypeError, AttributeError):
        error = "odd event"
    return Heard(text, is_done, error, time.monotonic() - started_s)


def judge(heard: Heard, expected: str) -> str:
    """Classify an answer: "same", "different", "cut in silence", or how it failed."""
    if heard.error is not None:
        # A client would take a failure after the finish reason for a complete answer.
        return "failed after its end" if heard.is_done else heard.error
    if not heard.is_done:
        return "cut in silence"
    return "same" if heard.text == expected else "different"


def kill_one(names: list[str], rng: random.Random) -> str | None:
    """Kill a random process with one of the names in its command line; return the name, or None if there is none."""
    found = processes_of(names)
    if not found:
        return None
    name, process = rng.choice(found)
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return None  # it has just ended by itself, or is not ours
    return name


def processes_of(names: list[str]) -> list[tuple[str, psutil.Process]]:
    """Return the processes with one of the names in their command line, each with that name."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        found += [(name, process) for name in names if name in line and "loadtest" not in line]
    return found


def refuse_others(names: list[str]) -> None:
    """End the program if one of these processes may not be killed, before anything is asked.

    Raises:
        SystemExit: one belongs to another user.
    """
    for name, process in processes_of(names):
        try:
            process.send_signal(0)
        except psutil.AccessDenied as failure:
            message = f"loadtest.soak: --kill {name}: process {process.pid} belongs to another user"
            raise SystemExit(message) from failure
        except psutil.NoSuchProcess:
            continue


class Tally:
    """Results of all streams so far, and the durations of the complete answers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.times_s: list[float] = []

    def add(self, verdict: str, took_s: float) -> None:
        """Count one answer."""
        with self._lock:
            self.counts[verdict] += 1
            if verdict in COMPLETE:
                self.times_s.append(took_s)


def undisturbed(client: httpx.Client, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the answer to each question before anything is killed.

    Raises:
        SystemExit: an answer is incomplete even then.
    """
    answers = [ask(client, body) for body in bodies]
    for heard in answers:
        if heard.error is not None or not heard.is_done:
            why = heard.error or "no finish reason"
            raise SystemExit(f"loadtest.soak: the server does not give whole answers even undisturbed ({why})")
    return [heard.text for heard in answers]


def keep_asking(
    client: httpx.Client, bodies: list[dict[str, Any]], expected: list[str], first: int, ends_s: float, tally: Tally
) -> str:
    """Ask one question after another until the time is up, and at least one; return the verdict on the last answer."""
    number, verdict, is_over = first, "", False
    while not is_over:
        number = (number + 1) % len(bodies)
        heard = ask(client, bodies[number])
        verdict = judge(heard, expected[number])
        tally.add(verdict, heard.took_s)
        if heard.error is not None:
            # Back off, as a well-behaved client does.
            time.sleep(0.5)
        is_over = time.monotonic() >= ends_s
    return verdict


def soak(url: str, model: str, *, minutes: float, streams: int, max_tokens: int, names: list[str]) -> dict[str, Any]:
    """Ask until the time is up, and return the results."""
    rng, kills, tally = random.Random(0), Counter[str](), Tally()
    # Without limits, streams beyond the hundredth would wait for a connection.
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    with (
        httpx.Client(
            base_url=url,
            headers=headers_for(),
            timeout=SLOW_S,
            limits=limits,
            # No proxy of the environment, but its certificates (SSL_CERT_FILE).
            trust_env=False,
            verify=ssl.create_default_context(),
        ) as client,
        ThreadPoolExecutor(streams) as pool,
    ):
        bodies = [question(model, number, max_tokens) for number in range(NUM_QUESTIONS)]
        expected = undisturbed(client, bodies)
        ends_s = time.monotonic() + 60 * minutes
        asking = [
            pool.submit(keep_asking, client, bodies, expected, number, ends_s, tally) for number in range(streams)
        ]
        # Leave time to recover from the last kill.
        while (left_s := ends_s - time.monotonic() - MENDING_S) > 0:
            time.sleep(min(PERIOD_S, left_s))
            killed = kill_one(names, rng) if names else None
            if killed is not None:
                kills[killed] += 1
                print(f"killed {killed}; so far {dict(tally.counts)}", flush=True)
        last = Counter(one.result() for one in asking)
    times_s = tally.times_s
    return {
        "minutes": minutes,
        "streams": streams,
        "answers": dict(tally.counts),
        "last_answers": dict(last),
        "kills": dict(kills),
        "p50_s": percentile(times_s, 0.5) if times_s else None,
        "p99_s": percentile(times_s, 0.99) if times_s else None,
        "longest_s": max(times_s, default=None),
    }


def main() -> int:
    """Soak and print; return 1 if an answer was wrong or the server did not recover from the last kill."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__)
    parser.add_argument("--url", type=http_url, required=True, help="http://host:port")
    parser.add_argument("--model", default="stdlib-chat")
    parser.add_argument("--minutes", type=above_0, default=20)
    parser.add_argument("--streams", type=at_least_1, default=8)
    parser.add_argument("--max-tokens", type=at_least_1, default=200)
    parser.add_argument("--kill", action="append", default=[], help="a name in a process' command line; repeatable")
    options = parser.parse_args()
    refuse_others(options.kill)
    found = soak(
        options.url,
        options.model,
        minutes=options.minutes,
        streams=options.streams,
        max_tokens=options.max_tokens,
        names=options.kill,
    )
    print(json.dumps(found))
    if not any(found["last_answers"].get(verdict) for verdict in COMPLETE):
        print("loadtest.soak: at the end, no stream got a complete answer", file=sys.stderr)
        return 1
    return int(any(found["answers"].get(bad) for bad in WRONG))


if __name__ == "__main__":
    raise SystemExit(main())
