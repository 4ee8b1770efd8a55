"""The thread that computes on a CPU stands back behind the process's other threads."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica.engine_thread import EngineThread
from engine.machine import NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")
@pytest.mark.parametrize(("device", "lower"), [("cpu", NICENESS), ("cuda", 0)])
async def test_only_a_thread_that_computes_stands_back(device: str, lower: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def run(_: object) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    engine: Any = SimpleNamespace(config=SimpleNamespace(device=device), run=run, stop=lambda: None)
    thread = EngineThread(engine, asyncio.get_running_loop(), lambda _: None)
    thread.start()
    await thread.stop()
    assert found == [min(19, before + lower)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
