"""Compare routing policies by simulation, without a model: `python -m loadtest.routing_simulation`.

Sessions with shared prefixes and Zipf-distributed adapters arrive at several gateways, each of which chooses replicas
on its own from their reports. The application's own policy runs unchanged (`deployments.routing.board`).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from deployments.routing.estimate import REPORT_PERIOD_S
from loadtest.arguments import above_0, at_least, at_least_1, make_folder
from loadtest.measure import percentile
from loadtest.routing_fleet import Replica, Sessions, Tally, Turn
from loadtest.routing_policies import POLICIES, Policy
from loadtest.tables import markdown_table

WARM_UP_SHARE = 0.3
THINK_S = 4.0
NUM_GATEWAYS = 4
TURNS_PER_SESSION = 4.5
"""Approximate mean; the request rate divided by it is the rate of new sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Parameters of a simulation; rates are requests per second over all sessions."""

    num_replicas: int
    num_adapters: int
    duration_s: float
    requests_per_replica_s: float
    seed: int = 1


class Simulation:
    """One run of one policy. Events are processed in order of time: turns, ends of requests, replica reports."""

    def __init__(self, scene: Scene, policy: str) -> None:
        self._scene = scene
        self._rng = random.Random(scene.seed)
        self._sessions = Sessions(scene.num_adapters, self._rng)
        ids = [f"replica-{place}" for place in range(scene.num_replicas)]
        self._replicas = [Replica(replica_id) for replica_id in ids]
        self._gateways: list[Policy] = [
            POLICIES[policy](ids, random.Random(scene.seed + 1 + place)) for place in range(NUM_GATEWAYS)
        ]
        self._events: list[tuple[float, int, object]] = []
        self._order = count()
        self.tally = Tally()

    def run(self) -> Tally:
        """Simulate to the end."""
        scene = self._scene
        rate = scene.num_replicas * scene.requests_per_replica_s / TURNS_PER_SESSION
        at_s = 0.0
        while (at_s := at_s + self._rng.expovariate(rate)) < scene.duration_s:
            self._at(at_s, self._sessions.first())
        for replica in self._replicas:
            self._at(self._rng.random() * REPORT_PERIOD_S, replica)
        loads_before = -1
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            if now_s > scene.duration_s:
                break
            if now_s > WARM_UP_SHARE * scene.duration_s and loads_before < 0:
                loads_before = self._num_loads()
            self._happen(event, now_s)
        self.tally.num_loads = self._num_loads() - max(0, loads_before)
        return self.tally

    def _happen(self, event: object, now_s: float) -> None:
        if isinstance(event, Replica):
            for gateway, report in zip(self._gateways, event.reports(NUM_GATEWAYS, now_s), strict=False):
                gateway.hear(report, now_s)
            self._at(now_s + REPORT_PERIOD_S, event)
        elif isinstance(event, Turn):
            self._ask(event, now_s)
        elif isinstance(event, tuple):
            gateway, request_id = event
            self._gateways[gateway].end(request_id)

    def _ask(self, turn: Turn, now_s: float) -> None:
        gateway = self._rng.randrange(NUM_GATEWAYS)
        request_id = f"{turn.session}-{turn.turns_left}"
        place = self._gateways[gateway].choose(turn.asked(request_id), turn.session, self._replicas, now_s)
        served = self._replicas[place].serve(turn, request_id, gateway, now_s)
        if now_s > WARM_UP_SHARE * self._scene.duration_s:
            self.tally.count(turn, served)
        self._at(served.end_s, (gateway, request_id))
        if turn.turns_left:
            self._at(served.end_s + self._rng.expovariate(1 / THINK_S), turn.next(self._rng))

    def _num_loads(self) -> int:
        return sum(replica.num_loads for replica in self._replicas)

    def _at(self, at_s: float, event: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))


def summary(tally: Tally) -> dict[str, float]:
    """Return the figures of one run.

    Raises:
        SystemExit: there was no request after the warm-up.
    """
    times = tally.first_token_s
    if not times:
        raise SystemExit("loadtest.routing_simulation: no request came after the warm-up; simulate a longer time")
    return {
        "requests": len(times),
        "ttft_p50_ms": 1000 * percentile(times, 0.5),
        "ttft_p99_ms": 1000 * percentile(times, 0.99),
        "prefix_hit_rate": tally.num_cached_tokens / tally.num_prompt_tokens,
        "adapter_loads": tally.num_loads,
    }


def compare(scene: Scene, policies: Iterable[str] = POLICIES) -> dict[str, dict[str, float]]:
    """Return the figures of every policy in one scene."""
    return {policy: summary(Simulation(scene, policy).run()) for policy in policies}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figures as a Markdown table."""
    rows = [
        [
            policy,
            *(f"{row[key]:.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms")),
            f"{row['prefix_hit_rate']:.1%}",
            f"{row['adapter_loads']:.0f}",
        ]
        for policy, row in found.items()
    ]
    return markdown_table(("policy", "TTFT p50 ms", "TTFT p99 ms", "prefix hit rate", "adapter loads"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print it, and write its figures and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--replicas", type=at_least(2), nargs="+", default=[8, 32, 200])
    parser.add_argument("--adapters", type=at_least_1, default=4000)
    parser.add_argument("--duration-s", type=above_0, default=20.0)
    parser.add_argument("--rates", type=above_0, nargs="+", default=[8.0, 14.0])
    parser.add_argument("--results", type=Path, default=Path("loadtest/results/routing.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/routing.png"))
    options = parser.parse_args(arguments)
    for file in (options.results, options.picture):
        make_folder(file.parent)
    runs = []
    for num_replicas in options.replicas:
        for rate in options.rates:
            scene = Scene(
                num_replicas=num_replicas,
                num_adapters=options.adapters,
                duration_s=options.duration_s,
                requests_per_replica_s=rate,
            )
            found = compare(scene)
            print(f"\n{num_replicas} replicas, {options.adapters} adapters, {rate:g} requests/s a replica\n")
            print(table(found), flush=True)
            runs.append({"replicas": num_replicas, "rate": rate, "adapters": options.adapters, "policies": found})
    options.results.write_text(json.dumps({"gateways": NUM_GATEWAYS, "runs": runs}, indent=1) + "\n")
    # Import Matplotlib only for the plot.
    from loadtest.plots import draw_routing

    draw_routing(runs, options.picture)


if __name__ == "__main__":
    main()
