"""Joining a cluster that is not there. test_server_process.py and tests/e2e/test_stop.py run the rest."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
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


SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_start_that_ray_was_too_slow_for_is_tried_once_more(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine it ended with a traceback that named neither a reason nor a log."""
    left = [SLOW] * num_failures

    def start(*args: Any, **options: Any) -> Any:
        if left:
            raise Exception(left.pop())
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    killed: list[int] = []
    monkeypatch.setattr(serve_run.os, "getsid", lambda pid: os.getpid())
    monkeypatch.setattr(serve_run, "kill_session", lambda session_id, *, but: killed.extend(but))
    if num_failures == 1:
        assert serve_run._start_ray("local", has_dashboard=False) == tmp_path / "logs"
    else:
        with pytest.raises(SystemExit, match=f"^{REASON}.*too busy.* {tmp_path}/ray/session_latest/logs$"):
            serve_run._start_ray("local", has_dashboard=False)
    assert capsys.readouterr().out.count("once more") == 1
    assert killed == [os.getpid()]


def test_another_failure_of_ray_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ValueError, match="no such option"):
        serve_run._start_ray("local", has_dashboard=False)


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
