"""A child process for `app.cli.serve_run`: started in its own session, watched, and ended with all its descendants.

The session identifies them: Ray's daemons, replicas and HAProxy inherit it and do not leave it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

GRACE_S = 20.0
"""Seconds for Serve to end after its last answers; a second signal cuts it short."""

TERM_S = 8.0

PARENT_PERIOD_S = 1.0

REASON = "reason: "
"""Prefix of the line in which the child says why it ends; lines of Ray's own shutdown may follow it."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ServerProcess:
    """The child and all that it starts.

    Copies its output to ours line by line, without Ray's colors unless ours is a terminal.

    Args:
        drain_s: seconds that running answers have to finish once it is stopped (`app.cli.serve_run`).
        has_dashboard: whether a cluster that it starts has Ray's dashboard.
    """

    def __init__(
        self,
        config: Path,
        environment: Mapping[str, str],
        *,
        address: str,
        drain_s: float,
        has_dashboard: bool,
    ) -> None:
        options = ["--address", address, "--drain-s", str(drain_s), *(["--dashboard"] if has_dashboard else [])]
        # Unbuffered, so that the reason of its end, printed last, also arrives last.
        command = [sys.executable, "-u", "-m", "app.cli.serve_run", str(config), *options]
        self._grace_s = drain_s + GRACE_S
        # The child inherits the mask, and unblocks SIGINT once it handles it: its imports take seconds.
        unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
        self._last_line = ""
        self._copier = threading.Thread(target=self._copy_output, name="serve-output", daemon=True)
        self._copier.start()

    def has_ended(self) -> bool:
        """Tell whether the child has ended."""
        return self._child.poll() is not None

    def failure(self) -> str | None:
        """Return why the child has ended, or None if it has not."""
        if self._child.poll() is None:
            return None
        self._copier.join(timeout=2)
        return f"`serve run` ended with status {self._child.returncode}: {self._last_line.removeprefix(REASON)}"

    def stop(self) -> None:
        """End the child with SIGINT, then SIGTERM, then kill what is left of its session; idempotent.

        A `KeyboardInterrupt` while waiting (a second Ctrl-C) skips to the kill: on a second signal, Ray would dump its
        stacks.
        """
        with contextlib.suppress(KeyboardInterrupt):
            for wanted, patience_s in ((signal.SIGINT, self._grace_s), (signal.SIGTERM, TERM_S)):
                if self._child.poll() is None:
                    self._child.send_signal(wanted)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._child.wait(patience_s)
        kill_session(self._child.pid)
        self._child.wait()

    def _copy_output(self) -> None:
        assert self._child.stdout is not None
        has_colours = sys.stdout.isatty()
        for line in self._child.stdout:
            tell(line if has_colours else COLOUR.sub("", line))
            if not self._last_line.startswith(REASON):
                self._last_line = COLOUR.sub("", line).rstrip()


def end_without(parent: int, end: Callable[[], object]) -> None:
    """Call `end` in this process once its parent, of that pid, is gone: nothing else would ever end it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_PERIOD_S)
        end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def tell(text: str) -> None:
    """Write to standard output; a full disk or a closed pipe must not end the server."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


def kill_session(session_id: int, *, but: Collection[int] = ()) -> None:
    """Kill every process of a session but some pids, repeatedly until none is left; refuses to kill this process."""
    if session_id == os.getsid(0) and os.getpid() not in but:
        raise ValueError("refusing to kill the session that this process is in")
    for _ in range(50):
        pids = set(session_members(session_id)).difference(but)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def session_members(session_id: int) -> list[int]:
    """Return the pids of a session's processes, zombies excluded."""
    members = []
    for pid in _all_pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session_id and not _is_zombie(pid):
                members.append(pid)
    return members


def _all_pids() -> list[int]:
    if Path("/proc/self").exists():
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    listed = subprocess.run(["ps", "-axo", "pid="], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def _is_zombie(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "Z"
        )
    except OSError:
        return False
