"""One `serve run` of ours: started in a session of its own, watched until it is ready, ended without a trace.

The session is what makes "everything it started" exact: Ray's daemons, replicas and HAProxy inherit it and do not leave
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

GRACE_S = 20.0
"""Seconds for Serve to end once its answers have; a second signal cuts it short."""

TERM_S = 8.0
_DASHBOARD = re.compile(r"dashboard at\s+(?:\x1b\[[0-9;]*m)*(http://[\w.:-]+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local addresses, whatever proxy the environment names."""


class ServerProcess:
    """The child and all that it starts.

    Its output is copied line by line to ours; Ray's dashboard address is read from it, because Serve accepts a
    configuration before any replica is up and tells only there how that ended.

    Args:
        drain_s: seconds that answers under way have once it is stopped (`app.serve_run`).
    """

    def __init__(self, config: Path, environment: Mapping[str, str], *, address: str, drain_s: float = 0.0) -> None:
        command = [sys.executable, "-m", "app.serve_run", str(drain_s), str(config), "--address", address]
        self._grace_s = drain_s + GRACE_S
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
        self._environment = environment
        self._dashboard_url: str | None = None
        self._tail: list[str] = []
        self._copier = threading.Thread(target=self._copy_output, name="serve-output", daemon=True)
        self._copier.start()

    def has_ended(self) -> bool:
        """Tell whether the child has ended."""
        return self._child.poll() is not None

    def failure(self) -> str | None:
        """Return why the deployment cannot come up, or None while it still may."""
        if self._child.poll() is not None:
            self._copier.join(timeout=2)
            return f"`serve run` ended with status {self._child.returncode}: {self._tail[-1] if self._tail else ''}"
        for name, application in self._applications().items():
            if application.get("status") == "DEPLOY_FAILED":
                reason = _reason(application)
                sys.stdout.write(f"\n{reason}\n")
                return f"application '{name}' failed to deploy: {reason.splitlines()[-1]}"
        return None

    @property
    def session_id(self) -> int:
        """The session of the child and of everything it starts."""
        return self._child.pid

    def stop(self) -> None:
        """End the child gracefully, then by force, then whatever is left of its session; idempotent.

        A `KeyboardInterrupt` while waiting (a second Ctrl-C) skips the rest of the grace.
        """
        try:
            for wanted, patience_s in ((signal.SIGINT, self._grace_s), (signal.SIGTERM, TERM_S)):
                if self._child.poll() is None:
                    self._child.send_signal(wanted)
                    self._wait(patience_s)
        finally:
            kill_session(self._child.pid)
            self._child.wait()

    def _wait(self, patience_s: float) -> None:
        try:
            self._child.wait(patience_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            return

    def _copy_output(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            self._tail = [*self._tail[-49:], line.rstrip()]
            if found := _DASHBOARD.search(line):
                self._dashboard_url = found.group(1)

    def _applications(self) -> dict[str, dict[str, object]]:
        if self._dashboard_url is None:
            return {}
        headers = {"authorization": f"Bearer {_auth_token(self._environment)}"}
        request = urllib.request.Request(f"{self._dashboard_url}/api/serve/applications/", headers=headers)
        try:
            with _DIRECT.open(request, timeout=5) as response:
                applications = json.load(response).get("applications", {})
        except (OSError, ValueError):
            return {}
        return applications if isinstance(applications, dict) else {}


def kill_session(session_id: int) -> None:
    """Kill every process of a session, again and again until none is left; this process's own session is refused."""
    if session_id == os.getsid(0):
        raise ValueError("refusing to kill the session that this process is in")
    for _ in range(50):
        pids = session_members(session_id)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def session_members(session_id: int) -> list[int]:
    """Return the living processes of a session."""
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


def _auth_token(environment: Mapping[str, str]) -> str:
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    path = environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _reason(application: Mapping[str, object]) -> str:
    messages = [str(application.get("message") or "")]
    deployments = application.get("deployments")
    if isinstance(deployments, dict):
        messages += [str(deployment.get("message") or "") for deployment in deployments.values()]
    text = "\n".join(message.strip() for message in messages if message) or "Serve gives no reason"
    return _COLOUR.sub("", text)
