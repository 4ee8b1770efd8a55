from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import IO

import pytest

from app.cli import entry


def test_an_interrupted_import_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "app.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "app.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert entry.main() == 130


def test_what_the_terminal_cannot_show_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an emoji, an answer was said to be from another kind of server."""
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("app.cli.main.main", lambda: print("ä 🙂"))
    entry.main()
    terminal.flush()
    assert shown.getvalue() == "ä ?\n".encode("latin-1")


def test_the_command_line_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.main.main", lambda: 7)
    assert entry.main() == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["env", "--help"])
def test_a_full_disk_ends_a_command_in_one_line(command: str, unbuffered: str) -> None:
    """It ended in a traceback of the command line's own code."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = antiphon(command, stdout=full, unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_quietly(unbuffered: str) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w") as pipe:
        ended = antiphon("env", stdout=pipe, unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (1, "")


def antiphon(command: str, *, stdout: IO[str], unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli.entry", command],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
