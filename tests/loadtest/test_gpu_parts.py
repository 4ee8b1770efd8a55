"""Parts of a benchmark: what hangs or crashes costs itself only, and what it had found is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from loadtest.gpu.parts import Notes, Part, run_parts

PART = """
import os, sys, time
from pathlib import Path
from loadtest.gpu.parts import Notes
notes = Notes(Path(sys.argv[2]))
notes.add("seen", 1)
if sys.argv[1] == "hangs":
    os.fork() and time.sleep(600) or time.sleep(600)
if sys.argv[1] == "crashes":
    os.abort()
notes.add("seen", 2)
"""

ENDS_ITS_PARENT = """
import os, signal, sys, time
from pathlib import Path
Path(sys.argv[2]).with_suffix(".txt").write_text(f"{os.getpid()} {os.getsid(0)}")
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
COMMAND = """
import sys
import torch
from loadtest.gpu import __main__ as command
torch.cuda.is_available = lambda: True
command.this_command = lambda _module: [sys.executable, "-c", sys.argv[1]]
command.main(["--only", "facts", "--out", sys.argv[2]])
"""


def part(name: str, limit_s: float = 60.0) -> Part:
    return Part(name=name, limit_s=limit_s, run=lambda notes: None)


def test_a_part_that_hangs_or_crashes_costs_only_itself(tmp_path: Path) -> None:
    out = tmp_path / "results" / "found.json"
    command = [sys.executable, "-c", PART]
    found = run_parts([part("hangs", 3), part("crashes"), part("works")], out, 1000.0, command)
    written = json.loads(out.read_text())
    assert written["parts"] == found["parts"]
    assert found["parts"]["hangs"]["error"] == "stopped after 3 s"
    assert found["parts"]["hangs"]["seen"] == [1]
    assert found["parts"]["crashes"]["error"] == "ended with status -6"
    assert found["parts"]["crashes"]["seen"] == [1]
    assert found["parts"]["works"]["error"] is None
    assert found["parts"]["works"]["seen"] == [1, 2]
    assert list(out.parent.iterdir()) == [out]


def test_a_part_that_cannot_be_killed_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One stuck in the driver was waited for beyond the budget, and there was no summary."""
    waits: list[object] = []

    class Stuck:
        pid = 2**30

        def __init__(self, *_arguments: object, **_options: object) -> None:
            pass

        def wait(self, timeout: float | None = None) -> int:
            waits.append(timeout)
            raise subprocess.TimeoutExpired("part", timeout or 0)

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    found = run_parts([part("stuck", 3), part("next", 3)], tmp_path / "found.json", 1000.0, [])
    assert [one["error"] for one in found["parts"].values()] == ["stopped after 3 s"] * 2
    assert None not in waits


def test_a_part_is_not_credited_with_what_an_interrupted_run_found(tmp_path: Path) -> None:
    """A part that died before its first note had the results of that run, which were judged, too."""
    (tmp_path / "found.dies.json").write_text('{"results": [{"of_floor": 0.99}]}')
    found = run_parts([part("dies")], tmp_path / "found.json", 1000.0, [sys.executable, "-c", "import nothing_like_it"])
    assert "results" not in found["parts"]["dies"]


def test_a_benchmark_that_is_asked_to_end_ends_its_part(tmp_path: Path) -> None:
    """The part had a session of its own: it went on using the GPU after `timeout` or a scheduler's limit."""
    command = [sys.executable, "-c", COMMAND, ENDS_ITS_PARENT, str(tmp_path / "found.json")]
    ended = subprocess.run(command, check=False)
    pid, session = map(int, (tmp_path / "found.facts.txt").read_text().split())
    try:
        assert ended.returncode == 128 + signal.SIGTERM
        assert not psutil.pid_exists(pid)
        assert session == os.getsid(0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_no_part_is_begun_without_time_for_it(tmp_path: Path) -> None:
    now_s = iter(range(0, 1000, 10))
    command = [sys.executable, "-c", PART]
    parts = [part("works"), part("late")]
    found = run_parts(parts, tmp_path / "found.json", 45.0, command, clock=lambda: next(now_s))
    assert found["parts"]["works"]["seen"] == [1, 2]
    assert found["parts"]["late"]["error"] == "no time was left"


def test_notes_are_whole_after_every_entry(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes.json")
    notes.tell("device", "a")
    notes.add("rows", {"ms": 1.5})
    notes.add("rows", {"ms": 2.5})
    assert json.loads((tmp_path / "notes.json").read_text()) == {"device": "a", "rows": [{"ms": 1.5}, {"ms": 2.5}]}


def test_what_fails_is_noted_and_the_rest_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes(tmp_path / "notes.json")
    for number in range(3):
        with notes.attempt(f"row {number}"):
            notes.add("quotients", 2 // (1 - number))
    assert notes.has_failures
    assert json.loads((tmp_path / "notes.json").read_text()) == {
        "quotients": [2, -2],
        "failures": [{"what": "row 1", "why": "ZeroDivisionError: integer division or modulo by zero"}],
    }
    assert "Traceback" in capsys.readouterr().err
