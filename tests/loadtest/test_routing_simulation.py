from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from loadtest.routing_fleet import CHUNK_TOKENS, DEVICE_ADAPTERS, HOST_ADAPTERS, ROWS, Replica, Sessions, Turn
from loadtest.routing_simulation import Scene, Simulation, compare, main, summary

SCENE = Scene(num_replicas=12, num_adapters=500, duration_s=20.0, requests_per_replica_s=8.0)


def turn_of(*marks: int, adapter: int | None = None) -> Turn:
    return Turn(1, adapter, marks, len(marks) * CHUNK_TOKENS + 100, 50, 0)


def test_the_products_choice_is_better_than_the_usual_ones() -> None:
    found = compare(SCENE)
    ours, blind, hashed = (found[name] for name in ("expected first token", "power of two", "session hash"))
    assert ours["ttft_p50_ms"] < hashed["ttft_p50_ms"] < blind["ttft_p50_ms"]
    assert ours["prefix_hit_rate"] > hashed["prefix_hit_rate"] > blind["prefix_hit_rate"]
    assert ours["adapter_loads"] < hashed["adapter_loads"] < blind["adapter_loads"]


def test_a_hot_prefix_is_spread() -> None:
    """By prefixes alone, all of its requests would go where it happened to be first."""
    hot = Scene(num_replicas=30, num_adapters=5, duration_s=12.0, requests_per_replica_s=12.0)
    found = compare(hot, ["prefix only", "expected first token"])
    assert found["expected first token"]["ttft_p99_ms"] < found["prefix only"]["ttft_p99_ms"] / 3
    assert found["expected first token"]["prefix_hit_rate"] > 0.9 * found["prefix only"]["prefix_hit_rate"]


def test_a_seed_repeats_a_run() -> None:
    scene = Scene(num_replicas=3, num_adapters=20, duration_s=4.0, requests_per_replica_s=4.0)
    first, again = (summary(Simulation(scene, "expected first token").run()) for _ in range(2))
    assert first == again


def test_a_replica_keeps_prefixes_queues_and_adapters() -> None:
    replica = Replica("r")
    first = replica.serve(turn_of(1, 2), "a", 0, 0.0)
    second = replica.serve(turn_of(1, 2), "b", 0, 0.0)
    assert (first.num_cached, second.num_cached) == (0, 2 * CHUNK_TOKENS)
    # The second waits for the first.
    assert second.first_token_s > first.first_token_s
    assert replica.serve(turn_of(3, adapter=7), "c", 0, 50.0).first_token_s > 0.3
    assert replica.serve(turn_of(3, adapter=7), "d", 0, 60.0).first_token_s < 0.3
    for adapter in range(100, 100 + HOST_ADAPTERS):
        replica.serve(turn_of(4, adapter=adapter), "e", 0, 100.0 + adapter)
    assert replica.num_loads == 1 + HOST_ADAPTERS
    replica.serve(turn_of(4, adapter=99 + HOST_ADAPTERS - DEVICE_ADAPTERS), "f", 0, 1000.0)
    assert replica.num_loads == 1 + HOST_ADAPTERS
    replica.serve(turn_of(4, adapter=7), "g", 0, 1000.0)
    assert replica.num_loads == 2 + HOST_ADAPTERS


def test_a_replica_reports_what_happened_to_it() -> None:
    replica = Replica("r")
    replica.serve(turn_of(1, 2), "a", 1, 0.0)
    reports = replica.reports(2, 0.0)
    assert [report.seen for report in reports] == [(), ["a"]]
    assert all(report.is_whole and set(report.landmarks_added) == {1, 2} for report in reports)
    assert (reports[0].num_running, reports[0].queued_tokens) == (1, 612)
    assert replica.reports(2, 1000.0) == []
    for _ in range(ROWS + 1):
        replica.serve(turn_of(1, 2), "b", 0, 2000.0)
    [report, _] = replica.reports(2, 2000.0)
    assert (report.num_running, report.num_waiting, report.is_whole) == (ROWS, 1, False)


def test_a_sessions_next_turn_extends_its_prompt() -> None:
    rng = random.Random(1)
    sessions = Sessions(10, rng)
    turn = next(turn for turn in iter(sessions.first, None) if turn.turns_left)
    following = turn.next(rng)
    assert following.marks[: len(turn.marks)] == turn.marks
    assert following.num_tokens > turn.num_tokens + turn.num_output
    assert (following.session, following.adapter) == (turn.session, turn.adapter)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    results, picture = tmp_path / "new" / "routing.json", tmp_path / "routing.png"
    scene = ["--replicas", "2", "--adapters", "9", "--duration-s", "3", "--rates", "3"]
    main([*scene, "--results", str(results), "--picture", str(picture)])
    [run] = json.loads(results.read_text())["runs"]
    assert run["policies"].keys() == {"power of two", "session hash", "prefix only", "expected first token"}
    assert picture.stat().st_size > 0


def test_a_time_too_short_for_a_request_is_said() -> None:
    scene = Scene(num_replicas=2, num_adapters=1, duration_s=0.01, requests_per_replica_s=1.0)
    with pytest.raises(SystemExit, match="simulate a longer time"):
        compare(scene)
