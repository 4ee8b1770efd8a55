from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from adapters.identity import AdapterDigest
from adapters.loads import AdapterLoads
from deployments.channel.token_frames import LENGTH
from deployments.generation_calls import TokenAddress
from deployments.routing import reporter as reporter_module
from deployments.routing.estimate import KEEPALIVE_S, ReplicaState
from deployments.routing.report import MAX_SEEN, LoadReport, adapter_mark, decode_report
from deployments.routing.reporter import ReplicaName, Reporter, Turnover
from engine.metrics import EngineLoad
from engine.request import RequestId

A, B = (TokenAddress(gateway_id=name, host="h", port=1) for name in "ab")
LOAD = EngineLoad(
    queued_tokens=0, num_running=0, num_waiting=0, max_running=4, prefill_tokens_per_s=9.0, step_s=0.1, stalled_s=0.0,
    num_ended=0, block_tokens=16, landmark_blocks=2, landmarks=frozenset({1, 2}),
)  # fmt: skip


class Bench:
    """A reporter whose engine, clock and gateways are in the test's hand."""

    loads = AdapterLoads(average_s=0.25)

    def __init__(self) -> None:
        self.load, self.now_s, self.sent = LOAD, 100.0, list[tuple[str, LoadReport]]()
        self.by_digest: dict[AdapterDigest, str] = {}
        self.reporter = Reporter(
            ReplicaName("m", "r1"), lambda: self.load, self, self.send_report, clock=lambda: self.now_s
        )

    def places(self) -> dict[AdapterDigest, str]:
        return self.by_digest

    def send_report(self, address: TokenAddress, report: bytes) -> None:
        self.sent.append((address.gateway_id, decode_report(report[LENGTH.size :])))

    def told(self) -> list[tuple[str, LoadReport]]:
        """Let it report once, and take what it sent."""
        self.reporter.report()
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_gateway_is_told_everything_and_then_what_changes(bench: Bench) -> None:
    bench.reporter.watch(A)
    [(gateway, first)] = bench.told()
    assert gateway == "a"
    assert first.is_whole
    assert set(first.landmarks_added) == {1, 2}
    assert (first.model, first.replica_id, first.adapter_load_s) == ("m", "r1", 0.25)
    assert bench.told() == []
    digest, other = AdapterDigest("ab" * 32), AdapterDigest("cd" * 32)
    bench.by_digest = {digest: "device", other: "loading"}
    bench.load = replace(LOAD, landmarks=frozenset({2, 3}), queued_tokens=7)
    [(_, second)] = bench.told()
    assert not second.is_whole
    assert (second.landmarks_added, second.landmarks_dropped, second.queued_tokens) == ([3], [1], 7)
    assert (second.adapters_on_device, second.adapters_coming) == ([adapter_mark(digest)], [adapter_mark(other)])
    # Silence ends `KEEPALIVE_S` after the last report, however often there was nothing to tell.
    bench.now_s += KEEPALIVE_S / 2
    assert bench.told() == []
    bench.now_s += KEEPALIVE_S / 2
    [(_, third)] = bench.told()
    assert (third.landmarks_added, third.adapters_on_device, third.adapters_coming) == ([], [], [])
    # It asks again where it has lost what it was told.
    bench.reporter.watch(A)
    [(_, fourth)] = bench.told()
    assert (fourth.is_whole, set(fourth.landmarks_added)) == (True, {2, 3})
    assert (fourth.adapters_on_device, fourth.adapters_coming) == (second.adapters_on_device, second.adapters_coming)
    bench.reporter.close()


async def test_of_many_adapters_only_those_that_have_moved_are_told(bench: Bench) -> None:
    """All were told at every change: 64 replicas of 1,000 adapters took half of each gateway's time."""
    digests = [AdapterDigest(f"{i:016x}".ljust(64, "0")) for i in range(1000)]
    bench.by_digest = dict.fromkeys(digests, "device")
    bench.reporter.watch(A)
    [(_, first)] = bench.told()
    assert set(first.adapters_on_device) == set(range(1000))
    bench.by_digest = dict.fromkeys(digests[1:], "device") | {digests[5]: "host"}
    [(_, second)] = bench.told()
    assert (second.adapters_on_device, second.adapters_coming, second.adapters_dropped) == ([], [5], [0])
    bench.reporter.close()


async def test_a_gateway_told_changes_knows_what_one_told_everything_knows(bench: Bench) -> None:
    rng, states = random.Random(1), {name: ReplicaState("r1") for name in "ab"}
    bench.reporter.watch(A)
    for _ in range(200):
        bench.by_digest = {
            AdapterDigest(f"{i:016x}".ljust(64, "0")): rng.choice(["device", "host", "loading"])
            for i in range(8)
            if rng.random() < 0.5
        }
        bench.reporter.watch(B)
        for gateway, report in bench.told():
            states[gateway].hear(report, 0.0, gateway)
        assert (states["a"].device, states["a"].coming) == (states["b"].device, states["b"].coming)
    bench.reporter.close()


async def test_no_more_requests_are_reported_than_a_report_may_name(bench: Bench) -> None:
    bench.reporter.watch(A)
    for _ in range(MAX_SEEN + 1):
        bench.reporter.note(A, RequestId("r"))
    [(_, report)] = bench.told()
    assert len(report.seen) == MAX_SEEN
    bench.reporter.close()


async def test_a_later_gateway_gets_everything_and_each_its_own_requests(bench: Bench) -> None:
    bench.reporter.watch(A)
    bench.told()
    bench.reporter.watch(B)
    bench.reporter.note(A, RequestId("of a"))
    bench.reporter.note(B, RequestId("of b"))
    bench.reporter.note(TokenAddress(gateway_id="c", host="h", port=1), RequestId("of nobody"))
    told = dict(bench.told())
    assert (told["a"].is_whole, told["b"].is_whole) == (False, True)
    assert (set(told["a"].landmarks_added), set(told["b"].landmarks_added)) == (set(), {1, 2})
    assert (told["a"].seen, told["b"].seen) == (["of a"], ["of b"])
    assert told["a"].num_gateways == 2
    bench.reporter.forget(A)
    assert dict(bench.told()).keys() == {"b"}
    bench.reporter.close()


async def test_an_error_ends_no_reports_and_what_it_left_untold_is_told_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica said nothing any more, and gateways chose others for as long as it lived."""
    monkeypatch.setattr(reporter_module, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(reporter_module, "REPORT_PERIOD_S", 0.0)
    bench.reporter.watch(A)
    bench.reporter.watch(B)
    bench.told()
    send, has_failed = bench.reporter._send, False

    def fail_once(address: TokenAddress, report: bytes) -> None:
        nonlocal has_failed
        if address == B and not has_failed:
            has_failed = True
            raise ValueError("once")
        send(address, report)

    monkeypatch.setattr(bench.reporter, "_send", fail_once)
    bench.load = replace(LOAD, landmarks=frozenset({2, 3}))
    async with asyncio.timeout(30):
        while len(bench.sent) < 3:
            await asyncio.sleep(0)
    bench.reporter.close()
    told = [(gateway, report.is_whole, set(report.landmarks_added)) for gateway, report in bench.sent[:3]]
    assert told == [("a", False, {3}), ("a", True, {2, 3}), ("b", True, {2, 3})]
    assert "the load could not be reported" in caplog.text


async def test_nothing_runs_where_nobody_watches(bench: Bench) -> None:
    assert len(asyncio.all_tasks()) == 1
    bench.reporter.watch(A)
    bench.reporter.watch(B)
    assert len(asyncio.all_tasks()) == 2
    while not bench.sent:
        await asyncio.sleep(0)
    bench.reporter.close()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    bench.sent.clear()
    assert bench.told() == []


def test_turnover_is_measured_only_while_others_wait() -> None:
    turnover = Turnover()
    full = replace(LOAD, num_running=4, num_waiting=3)
    assert turnover.observe(replace(LOAD, num_ended=5), 0.0) == 0
    assert turnover.observe(replace(full, num_ended=5), 1.0) == 0
    assert turnover.observe(replace(full, num_ended=5), 2.0) == 0
    assert turnover.observe(replace(full, num_ended=9), 3.0) == 0.5
    # Those that wait beside free rows wait for something else.
    assert turnover.observe(replace(full, num_running=3, num_ended=9), 40.0) == 0.5
    assert turnover.observe(replace(full, num_ended=12), 45.0) == 0.5
    assert turnover.observe(replace(LOAD, num_ended=12), 50.0) == 0.5
    assert turnover.observe(replace(full, num_ended=12), 60.0) == 0.5
    assert turnover.observe(replace(full, num_ended=13), 61.5) == 1.0
    assert turnover.observe(replace(full, num_ended=15), 62.5) == 0.75


async def test_a_gateway_that_comes_after_all_others_have_left_is_told(bench: Bench) -> None:
    bench.reporter.watch(A)
    bench.reporter.forget(A)
    async with asyncio.timeout(30):
        await asyncio.sleep(0)
        bench.reporter.watch(B)
        while not bench.sent:
            await asyncio.sleep(0)
    assert [gateway for gateway, _ in bench.sent] == ["b"]
    bench.reporter.close()
