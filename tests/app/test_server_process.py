"""The child here is a stand-in for `serve run`, put before the real one on its import path; the signals are real."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from app.server_process import ServerProcess, kill_session, session_members

STAND_IN = """
import os, signal, subprocess, sys, time
print("View the dashboard at \\x1b[1mhttp://127.0.0.1:1 \\x1b[0m", flush=True)
mode = open(sys.argv[2]).read().strip()
subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
if mode == "fails":
    sys.exit("no such thing")
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("ended gracefully", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    package = tmp_path / "ray" / "serve"
    package.mkdir(parents=True)
    for name in (package.parent / "__init__.py", package / "__init__.py"):
        name.touch()
    (package / "scripts.py").write_text(STAND_IN)
    return Start(tmp_path)


class Start:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, mode: str) -> ServerProcess:
        config = self.folder / "config"
        config.write_text(mode)
        environment = {"PYTHONPATH": str(self.folder), "PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return ServerProcess(config, environment, address="local")


def until_printed(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    seen = ""
    deadline_s = time.monotonic() + 30
    while text not in seen and time.monotonic() < deadline_s:
        seen += capfd.readouterr().out
        time.sleep(0.01)
    assert text in seen
    return seen


def test_stopping_is_graceful_and_leaves_nobody(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start("runs")
    until_printed("up", capfd)
    assert server.failure() is None
    assert len(session_members(server.session_id)) == 2
    server.stop()
    assert session_members(server.session_id) == []
    assert server.has_ended()
    until_printed("ended gracefully", capfd)
    server.stop()


def test_a_child_that_will_not_end_is_made_to(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.server_process.GRACE_S", 0.1)
    monkeypatch.setattr("app.server_process.TERM_S", 0.1)
    server = start("stubborn")
    until_printed("up", capfd)
    server.stop()
    assert session_members(server.session_id) == []


def test_a_child_that_ends_says_why(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start("fails")
    until_printed("no such thing", capfd)
    while not server.has_ended():
        time.sleep(0.01)
    assert server.failure() == "`serve run` ended with status 1: no such thing"
    server.stop()
    assert session_members(server.session_id) == []


def test_ones_own_session_is_never_killed() -> None:
    with pytest.raises(ValueError, match="refusing"):
        kill_session(os.getsid(0))
