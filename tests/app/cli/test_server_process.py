"""The child here runs a stand-in for Serve, put before the real one on its import path; the signals are real."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.config_file import BUILDER
from app.cli.server_process import ServerProcess, kill_session, session_members

STAND_IN = """
import atexit, signal, subprocess, sys
from ray import serve
def cli(arguments, prog_name, standalone_mode):
    command, blocking, config = arguments
    assert (command, blocking) == ("run", "--non-blocking")
    serve.mode = open(config).read().partition("mode: ")[2].strip()
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
    if serve.mode == "never deploys":
        atexit.register(print, "what Ray has told before [repeated 2x across cluster]", flush=True)
    if serve.mode == "fails":
        print("told before")
        sys.exit("no such thing")
    if serve.mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("\\x1b[36mup\\x1b[0m", flush=True)
"""
STAND_IN_RAY = """
from types import SimpleNamespace
def init(address, **options):
    print("init", address, options, flush=True)
    return SimpleNamespace(address_info={"session_dir": "/no/such/session"})
def is_initialized():
    return True
def cluster_resources():
    return {"CPU": 2.0}
"""
STAND_IN_SERVE = """
import atexit, logging, sys
from types import SimpleNamespace
asked = []
mode = None
def status():
    if mode == "never deploys":
        gateway = SimpleNamespace(message="\\x1b[36m(replica)\\x1b[0m no room\\nno such checkpoint")
        bad = SimpleNamespace(status="DEPLOY_FAILED", message="", deployments={"Gateway": gateway})
        return SimpleNamespace(applications={"bad": bad})
    states = {"up": {"RUNNING": 1}, "starting": {"STARTING": 1}}
    parts = {name: {"Gateway": SimpleNamespace(replica_states=state)} for name, state in states.items()}
    parts["another's"] = {"Other": SimpleNamespace(replica_states={"RUNNING": 1})}
    return SimpleNamespace(
        applications={name: SimpleNamespace(status="RUNNING", deployments=part) for name, part in parts.items()}
    )
def shutdown():
    print("ended gracefully", flush=True)
def get_deployment_handle(deployment, application):
    def broadcast(method, limit_s):
        print("asked", deployment, application, method, limit_s, flush=True)
        async def results_async(*, return_exceptions):
            asked.append(application)
            if len(asked) > 1:
                print("waited", flush=True)
            return [None][:len(asked) - 1]
        return SimpleNamespace(results_async=results_async)
    return SimpleNamespace(broadcast=broadcast)
async def shutdown_async():
    print("what belongs to every end", flush=True)
    print("ended gracefully", file=sys.stderr, flush=True)
    atexit.register(logging.getLogger("ray.serve").error, "the loop of a handle has ended")
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    package = tmp_path / "ray" / "serve"
    package.mkdir(parents=True)
    (package.parent / "_private").mkdir()
    (package.parent / "_private" / "services.py").write_text("def start_raylet(): pass")
    (package.parent / "__init__.py").write_text(STAND_IN_RAY)
    (package.parent / "exceptions.py").write_text("class RayError(Exception): pass")
    (package / "exceptions.py").write_text("class RayServeException(Exception): pass")
    (package / "__init__.py").write_text(STAND_IN_SERVE)
    (package / "scripts.py").write_text(STAND_IN)
    return Start(tmp_path, monkeypatch)


class Start:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.printed = io.StringIO()

    def __call__(
        self, mode: str, device: str = "cpu", num_cpus: float = 1, has_dashboard: bool = False
    ) -> ServerProcess:
        # pytest's own capture loses what a thread writes while it is read.
        self.monkeypatch.setattr("sys.stdout", self.printed)
        config = self.folder / "config"
        args = {"models": [{"name": "base", "engine": {"device": device}}]}
        options_of_ray = {"num_cpus": num_cpus, "num_gpus": 1 if device == "cuda" else 0}
        application = {
            "import_path": BUILDER,
            "args": args,
            "deployments": [{"name": "Model-base", "ray_actor_options": options_of_ray}],
        }
        config.write_text(yaml.safe_dump({"applications": [application], "mode": mode}))
        environment = {"PYTHONPATH": str(self.folder), "PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return ServerProcess(config, environment, address="local", drain_s=7.0, has_dashboard=has_dashboard)

    def until_printed(self, text: str) -> str:
        until(lambda: text in self.printed.getvalue())
        return self.printed.getvalue()


def until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_stopping_is_graceful_and_leaves_nobody(start: Start) -> None:
    server = start("runs")
    assert "\nup\n" in start.until_printed("up\n"), "without colours, where this is no terminal"
    assert server.failure() is None
    assert len(session_members(server._child.pid)) == 2
    server.stop()
    assert session_members(server._child.pid) == []
    assert server.has_ended()
    told = start.until_printed("ended gracefully")
    # The gateways that are there first, and only of ours.
    assert told.index("asked Gateway up drain 7.0") < told.index("waited") < told.index("ended gracefully")
    assert "every end" not in told
    assert "of a handle" not in start.printed.getvalue()
    assert "Traceback" not in told
    # A handle knows nobody at first.
    assert (told.count("asked"), told.count("waited")) == (2, 1)
    server.stop()


def test_a_child_that_is_stopped_while_it_imports_says_nothing(start: Start) -> None:
    """Ctrl-C in the first seconds printed its traceback."""
    module = start.folder / "ray" / "__init__.py"
    waits = "import signal, time\nprint('imports', flush=True)\nwhile not signal.sigpending():\n    time.sleep(0.01)\n"
    not_yet = "def is_initialized():\n    return False\n"
    module.write_text(waits + STAND_IN_RAY + not_yet)
    server = start("runs")
    start.until_printed("imports")
    server.stop()
    server._copier.join()
    assert start.printed.getvalue() == "imports\n"


def test_a_child_that_will_not_end_is_made_to(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.server_process.TERM_S", 0.1)
    server = start("stubborn")
    server._grace_s = 0.1
    start.until_printed("up")
    server.stop()
    assert session_members(server._child.pid) == []


def test_who_is_told_twice_to_stop_kills_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM after SIGINT made Ray dump its stacks on the terminal."""
    server = start("stubborn")
    start.until_printed("up")
    sent: list[int] = []

    def wait(patience_s: float | None = None) -> None:
        if patience_s is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(server._child, "send_signal", sent.append)
    monkeypatch.setattr(server._child, "wait", wait)
    server.stop()
    assert sent == [signal.SIGINT]
    assert session_members(server._child.pid) == []


def test_a_child_that_ends_says_why(start: Start) -> None:
    server = start("fails")
    start.until_printed("no such thing")
    until(server.has_ended)
    assert server.failure() == "`serve run` ended with status 1: no such thing"
    server.stop()
    assert session_members(server._child.pid) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"device": "cuda"}, "models request 1 GPU(s), but Ray found 0 on this machine"),
        ({"num_cpus": 64}, "a replica of 'Model-base' requests 64 CPUs, but Ray found 2 on this machine"),
    ],
)
def test_what_this_machine_does_not_have_is_not_waited_for(start: Start, asked: dict[str, Any], reason: str) -> None:
    server = start("runs", **asked)
    until(server.has_ended)
    failure = server.failure()
    assert failure is not None
    assert f"status 1: {reason}" in failure
    server.stop()
    assert "up" not in start.printed.getvalue()


def test_an_application_that_never_runs_ends_the_server_with_the_reason(start: Start) -> None:
    server = start("never deploys")
    start.until_printed("repeated 2x")
    until(server.has_ended)
    reason = "application 'bad' failed to deploy: no such checkpoint"
    assert server.failure() == f"`serve run` ended with status 1: {reason}"
    server.stop()


@pytest.mark.parametrize("has_dashboard", [False, True])
def test_rays_dashboard_is_there_for_who_asks(start: Start, has_dashboard: bool) -> None:
    server = start("runs", has_dashboard=has_dashboard)
    told = start.until_printed("up")
    assert f"init local {{'namespace': 'serve', 'include_dashboard': {has_dashboard}" in told
    server.stop()


def test_a_server_whose_starter_is_killed_ends_too(start: Start) -> None:
    """It served on with nobody to end it, and the next start found its port in use."""
    read_end, write_end = os.pipe()
    starter = os.fork()
    if starter == 0:
        os.write(write_end, str(start("runs")._child.pid).encode())
        start.until_printed("up")
        os.kill(os.getpid(), signal.SIGKILL)
    session_id = int(os.read(read_end, 100))
    os.waitpid(starter, 0)
    try:
        until(lambda: session_id not in session_members(session_id))
    finally:
        kill_session(session_id)


def test_what_cannot_be_printed_ends_no_server(start: Start) -> None:
    """The disk of its output was full: what copies it ended, and the child would have waited at a full pipe."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    start.printed = Full()
    server = start("runs")
    start.until_printed("up")
    server.stop()
    assert "ended gracefully" in start.printed.getvalue()


def test_a_session_may_be_killed_but_for_its_leader() -> None:
    code = (
        "import os, subprocess, sys; from app.cli.server_process import kill_session, session_members\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "kill_session(os.getpid(), but=(os.getpid(),))\n"
        "print(child.wait(), session_members(os.getpid()) == [os.getpid()])"
    )
    done = subprocess.run([sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("-9 True\n", "")


def test_ones_own_session_is_never_killed() -> None:
    with pytest.raises(ValueError, match="refusing"):
        kill_session(os.getsid(0))
