"""How a worker is asked for: forks themselves are in `test_worker_template.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ray

from app.cli import forked_worker
from tests.app.cli.stand_in_ray import write_stand_in_ray


def test_the_place_is_the_one_of_the_cluster_that_the_worker_is_for(tmp_path: Path) -> None:
    given = ["--node-ip-address=127.0.0.1", f"--temp-dir={tmp_path}", "--session-name=session_1", "--head"]
    assert forked_worker.template_place(given) == forked_worker.socket_place(tmp_path / "session_1")


def test_rays_own_worker_is_found_where_ray_is() -> None:
    assert Path(forked_worker.default_worker()).parents[2] == Path(ray.__file__).parent
    assert Path(forked_worker.default_worker()).exists()


def test_where_nobody_forks_the_process_becomes_a_plain_worker_with_the_same_flags(tmp_path: Path) -> None:
    write_stand_in_ray(tmp_path)
    given = [f"--temp-dir={tmp_path}", "--session-name=session_1", "two words"]
    command = [sys.executable, "-s", forked_worker.__file__, *given]
    ended = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    told = json.loads(ended.stdout)
    assert told["argv"] == [str(tmp_path / "ray/_private/workers/default_worker.py"), *given]
    assert told["name"] == "__main__"
    assert ended.stderr == ""
