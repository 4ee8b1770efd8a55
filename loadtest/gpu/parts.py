"""Run the parts of a benchmark in separate processes: a part that hangs, crashes or corrupts the device fails alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_S = 15
"""No part is started with less time left."""
KILL_S = 10
FAILURES, LOG, MAX_REASON = "failures", "log", 500
LOGGERS = ("engine", "kernels")
PROGRESS = "engine.gpu.progress"
"""Its lines are bars, for those who wait."""
Attempt = Callable[[str], AbstractContextManager[object]]
"""The type of `Notes.attempt`; `contextlib.nullcontext` lets failures propagate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part and its time limit.

    Attributes:
        run: called with a `Notes`, in its own process.
        is_usual: whether it runs by default.
    """

    name: str
    limit_s: float
    run: Callable[[Notes], None]
    is_usual: bool = True


class Notes:
    """Results of a part, written to a file with every entry, so that a stopped part keeps what it found."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        # The engine logs from its own threads.
        self._writing = threading.Lock()

    def beside(self, name: str) -> Path:
        """Return a path for data too large for the notes; it is kept after the run."""
        return self._path.with_name(f"{self._path.stem}.{name}")

    def tell(self, key: str, value: object) -> None:
        """Set a JSON value."""
        with self._writing:
            self._found[key] = value
            self._write()

    def add(self, key: str, entry: object) -> None:
        """Append an entry to a list."""
        with self._writing:
            self._found.setdefault(key, []).append(entry)
            self._write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an exception raised in the block and continue with the rest of the part."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - on a device that nobody has met anything may
            traceback.print_exc()
            self.add(FAILURES, {"what": what, "why": f"{type(error).__name__}: {error}"[:MAX_REASON]})

    @contextmanager
    def log(self) -> Iterator[None]:
        """Record what the engine and its kernels log in the block: the kernels chosen, and what is given up and why."""
        handler = _LogNotes(self)
        loggers = [logging.getLogger(name) for name in LOGGERS]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)

    @property
    def has_failures(self) -> bool:
        """Whether any `attempt` has failed."""
        return FAILURES in self._found

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._found), encoding="utf-8")
        fresh.replace(self._path)


class _LogNotes(logging.Handler):
    """Adds each log line to the notes of a part, with its level."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != PROGRESS:
            message = record.getMessage()[:MAX_REASON]
            self._notes.add(LOG, {"level": record.levelname, "message": message})


def run_parts(
    parts: Sequence[Part],
    out: Path,
    budget_s: float,
    command: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run parts one after another within a time budget, rewriting `out` after each; return the results.

    Args:
        command: runs a part when its name and the path of its notes are appended.
    """
    started_s = clock()
    found: dict[str, Any] = {"parts": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left_s = budget_s - (clock() - started_s)
        if left_s < LEAST_S:
            found["parts"][part.name] = {"seconds": 0.0, "error": "no time was left"}
            continue
        print(f"\n== {part.name} (at most {min(left_s, part.limit_s):.0f} s)", flush=True)
        notes = out.with_name(f"{out.stem}.{part.name}.json")
        # An interrupted run may have left its own there.
        notes.unlink(missing_ok=True)
        begun_s = clock()
        error = _run([*command, part.name, str(notes)], min(left_s, part.limit_s))
        told = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
        notes.unlink(missing_ok=True)
        found["parts"][part.name] = {"seconds": clock() - begun_s, "error": error} | told
        found["seconds"] = clock() - started_s
        out.write_text(json.dumps(found, indent=2), encoding="utf-8")
        print(f"== {part.name}: {error or 'done'} after {clock() - begun_s:.0f} s", flush=True)
    return found


def _run(command: Sequence[str], limit_s: float) -> str | None:
    """Run a process, then kill all that it started; return an error message, or None."""
    # A group of its own, to be killed at once, but no session: who ends that of this process ends the part, too.
    process = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        # Processes that a part started, such as compilers, must not slow down the next part.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that is stuck in the driver ends when the driver lets it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_S)
    return None if status == 0 else f"ended with status {status}"


def this_command(module: str) -> list[str]:
    """Return the command that runs a part of a module with this interpreter."""
    return [sys.executable, "-m", module, "--part"]
