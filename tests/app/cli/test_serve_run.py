"""Joining a cluster that is not there. test_server_process.py and tests/e2e/test_stop.py run the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from app.cli import serve_run
from app.cli.server_process import REASON
from deployments.config import GATEWAY


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_cluster_that_cannot_be_joined_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(SystemExit) as ended:
        serve_run._start_ray(address, has_dashboard=False)
    text = ended.value.code
    assert isinstance(text, str)
    assert text.startswith(f"{REASON}Failed to connect to Ray cluster. ")
    assert "token" in text
    assert "\n" not in text


async def test_a_gateway_that_dies_while_it_drains_ends_no_answer_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others were shut down in the middle of theirs."""
    ended: list[str] = []

    async def drained(is_dead: bool) -> None:
        if is_dead:
            raise ActorDiedError
        await asyncio.sleep(0.02)
        ended.append("drained")

    class Broadcast:
        async def results_async(self, *, return_exceptions: bool = False) -> list[Any]:
            calls = (drained(is_dead) for is_dead in (True, False))
            return await asyncio.gather(*calls, return_exceptions=return_exceptions)

    handle = SimpleNamespace(broadcast=lambda name, limit_s: Broadcast())
    deployment = SimpleNamespace(replica_states={"RUNNING": 2})
    status = SimpleNamespace(applications={"app": SimpleNamespace(deployments={GATEWAY: deployment})})
    monkeypatch.setattr(serve_run.serve, "get_deployment_handle", lambda *names: handle)
    monkeypatch.setattr(serve_run.serve, "status", lambda: status)
    await serve_run.drain(5.0)
    assert ended == ["drained"]
