"""An engine's thread: it stands back on a CPU, and nobody waits for ever until it has ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica import engine_thread
from deployments.replica.engine_thread import EngineThread
from engine.machine import NICENESS
from engine.request import Emission, FinishReason, RequestId


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")
@pytest.mark.parametrize(("device", "lower"), [("cpu", NICENESS), ("cuda", 0)])
async def test_only_a_thread_that_computes_stands_back(device: str, lower: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def run(_: object) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    engine: Any = SimpleNamespace(config=SimpleNamespace(device=device), run=run, stop=lambda: None, has_failed=False)
    thread = EngineThread(engine, asyncio.get_running_loop(), lambda _: None)
    await thread.stop()
    assert found == [min(19, before + lower)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


async def test_a_replica_stops_though_its_engine_waits_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's load hung, and with it the replica, for the ten minutes that Serve grants."""
    monkeypatch.setattr(engine_thread, "STOP_S", 0.05)
    answers, has_ended = threading.Event(), threading.Event()

    def run(_: object) -> None:
        answers.wait(10.0)
        has_ended.set()

    engine: Any = SimpleNamespace(config=SimpleNamespace(device="cuda"), run=run, stop=lambda: None, has_failed=False)
    thread = EngineThread(engine, asyncio.get_running_loop(), lambda _: None)
    await thread.stop()
    assert not has_ended.is_set()
    answers.set()


@pytest.mark.parametrize("emissions", [[], [Emission(request_id=RequestId("r"), finish_reason=FinishReason.FAILED)]])
async def test_an_engine_s_failure_is_told_before_its_streams_hear_of_it(emissions: list[Emission]) -> None:
    """They tried the same replica again until all their attempts were used up, in milliseconds."""
    told: list[object] = []

    def run(on_emissions: Any) -> None:
        engine.has_failed = True
        if emissions:
            on_emissions(emissions)

    engine: Any = SimpleNamespace(config=SimpleNamespace(device="cuda"), run=run, stop=lambda: None, has_failed=False)
    thread = EngineThread(engine, asyncio.get_running_loop(), told.extend, lambda: told.append("failed"))
    await thread.stop()
    assert told[0] == "failed"
    # It is told again when the thread ends, before or after the loop has delivered the emissions.
    assert [one for one in told if one != "failed"] == emissions


def test_a_process_whose_engine_fails_ends() -> None:
    program = "from deployments.actor_process import end_process; end_process()"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 1
