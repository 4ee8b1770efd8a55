"""Real templates fork real workers here; Ray itself is a stand-in that tells what its worker was given."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import forked_worker, worker_forks, worker_template
from tests.app.cli.stand_in_ray import write_stand_in_ray
from tests.architecture.source_tree import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only")


class Cluster:
    """A folder as Ray makes one for a cluster, with a template that listens there."""

    def __init__(self, folder: Path) -> None:
        write_stand_in_ray(folder)
        (folder / "session_1" / "sockets").mkdir(parents=True)
        self.folder = folder
        self.environment = {"PYTHONPATH": f"{folder}:{ROOT}", "RAY_COLOUR": "green"}
        self.template = worker_forks.start_template(folder / "session_1", self.environment)

    def start_worker(self, **variables: str) -> dict[str, Any]:
        """Start a worker as Ray does; returns what it tells of itself, and `asker`, the process that Ray started."""
        given = [f"--temp-dir={self.folder}", "--session-name=session_1"]
        with subprocess.Popen(
            [sys.executable, forked_worker.__file__, *given],
            env=self.environment | variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as asker:
            told: dict[str, Any] = json.loads(asker.communicate()[0])
        return told | {"asker": asker.pid, "is_fork": told["parent"] == self.template.pid}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.template.kill()
    cluster.template.wait()


def test_a_fork_is_the_worker_that_was_asked_for(cluster: Cluster) -> None:
    told = cluster.start_worker(SPT_NOENV="1")
    assert told["is_fork"]
    assert told["name"] == "__main__"
    assert told["argv"][0] == str(cluster.folder / "ray/_private/workers/default_worker.py")
    assert told["argv"][1:] == [f"--temp-dir={cluster.folder}", "--session-name=session_1"]
    assert told["folder"] == str(cluster.folder)
    assert told["variables"]["SPT_NOENV"] == "1"
    assert "OPENBLAS_NUM_THREADS" not in told["variables"]
    # Nothing of the template's own is left open, nor the way it treats its children.
    assert told["num_streams"] == 3
    assert told["sigchld"]
    assert told["leads_its_group"]


def test_one_template_forks_many_workers_and_leaves_none_unburied(cluster: Cluster) -> None:
    assert all(cluster.start_worker()["is_fork"] for _ in range(3))
    children = Path(f"/proc/{cluster.template.pid}/task/{cluster.template.pid}/children")
    while children.read_text():  # the last one has said what it is, and is about to end
        time.sleep(0.01)


@pytest.mark.parametrize("variables", [{"RAY_COLOUR": "red"}, {"SOMETHING": "else"}])
def test_a_worker_of_another_environment_is_a_plain_one(cluster: Cluster, variables: dict[str, str]) -> None:
    told = cluster.start_worker(**variables)
    assert not told["is_fork"]
    assert variables.items() <= told["variables"].items()
    assert cluster.start_worker()["is_fork"]


def test_without_the_template_a_worker_is_a_plain_one(cluster: Cluster) -> None:
    cluster.template.kill()
    cluster.template.wait()
    assert not cluster.start_worker()["is_fork"]


def test_only_its_own_user_may_ask_the_template(cluster: Cluster) -> None:
    assert forked_worker.socket_place(cluster.folder / "session_1").stat().st_mode & 0o777 == 0o600


def run(source: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_is_imported_beforehand_leaves_forks_sound_and_brings_neither_torch_nor_transformers() -> None:
    """Of Ray itself: its generator of ids is seeded once in a process, and by whoever draws first."""
    source = f"""
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from app.cli import worker_template
worker_template.draw_actor_class_ids_from_the_system()
for module in {(*worker_template.NEEDED_FIRST, *worker_template.NEEDED_LATER)}:
    __import__(module)
print(worker_template.has_sound_forks(), sorted({{"torch", "transformers"}} & sys.modules.keys()))
from ray import NodeID
NodeID.from_random()
print(worker_template.has_sound_forks())
"""
    assert run(source).splitlines() == ["True []", "False"]


def test_a_process_with_threads_has_no_sound_forks() -> None:
    source = """
import threading
from app.cli.worker_template import has_sound_forks
print(has_sound_forks())
thread = threading.Thread(target=(over := threading.Event()).wait)
thread.start()
print(has_sound_forks())
over.set()
"""
    assert run(source).splitlines() == ["True", "False"]


def test_a_fork_is_for_the_same_interpreter_and_environment_but_for_what_ray_sets_for_its_workers() -> None:
    def is_fork(executable: str = sys.executable, **environment: str) -> bool:
        asked = worker_template.WorkerRequest(executable, [], environment, "/", [])
        return worker_template.can_be_a_fork(asked, {"A": "1"})

    assert is_fork(A="1")
    assert is_fork(A="1", SPT_NOENV="1")
    assert not is_fork(A="2")
    assert not is_fork()
    assert not is_fork(A="1", RAY_JOB_ID="02000000")
    assert not is_fork("/another/python", A="1")


def test_who_ends_while_it_asks_is_no_trouble_to_the_next(cluster: Cluster) -> None:
    place = str(forked_worker.socket_place(cluster.folder / "session_1"))
    for begun in (b"", b"?", b"?[1, 2", b"?[1, 2]"):
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(place)
            asker.sendall(begun)
    assert cluster.start_worker()["is_fork"]
