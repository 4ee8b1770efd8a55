"""Ray's own step is a stand-in here; `tests/e2e/test_workers.py` starts the real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services

from app.cli import forked_worker, worker_forks


def test_a_cluster_that_runs_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert worker_forks.are_possible("local")
    assert not worker_forks.are_possible("auto")
    monkeypatch.setattr("sys.platform", "darwin")
    assert not worker_forks.are_possible("local")


def test_the_raylet_runs_our_program_for_workers_and_the_template_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def start_raylet(node: str, worker_path: str, session_dir: str, is_head: bool = False) -> SimpleNamespace:
        told.append((node, worker_path, session_dir, is_head))
        return SimpleNamespace(process=SimpleNamespace(pid=17))

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(worker_forks, "start_template", lambda *given: told.append(given))
    variables = {"A": "before"}
    with worker_forks.forked_workers(lambda: variables):
        variables["A"] = "set by Ray"
        assert services.start_raylet("node", "plain.py", "/session", is_head=True).process.pid == 17
    assert told[0] == ("node", forked_worker.__file__, "/session", True)
    environment = {"A": "set by Ray", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "17"}
    assert told[1] == (Path("/session"), environment)
    assert services.start_raylet is start_raylet


def test_another_ray_starts_plain_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_raylet(command: str) -> None: ...

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    with worker_forks.forked_workers(dict):
        assert services.start_raylet is start_raylet


def test_the_ray_that_is_installed_is_not_another() -> None:
    plain = services.start_raylet
    with worker_forks.forked_workers(dict):
        assert services.start_raylet is not plain
    assert services.start_raylet is plain
