"""Makes a cluster started by this process fork its workers from a template that has imported what they need.

Ray has no such feature, so one step of its startup is wrapped. The template (`app.cli.worker_template`) starts in
parallel with the rest of Ray, so its imports do not add to the startup time.
"""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.cli import forked_worker

SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
"""Ray would prestart workers before it knows their job; those could not be forks."""

_NEEDED = {"worker_path", "session_dir"}


def are_possible(address: str) -> bool:
    """Tell whether workers of the cluster at `address` can be forks: it is started here, on Linux."""
    return address == "local" and sys.platform == "linux"


@contextmanager
def forked_workers(environment: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Make a cluster started within this context fork its workers.

    Args:
        environment: returns this process's environment; called late, as Ray adds to what its workers inherit.
    """
    from ray._private import services

    start_raylet = services.start_raylet
    signature = inspect.signature(start_raylet)
    if not signature.parameters.keys() >= _NEEDED:
        # This version of Ray differs from the one this was written for: use plain workers.
        yield
        return

    def start_with_template(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.arguments["worker_path"] = forked_worker.__file__
        raylet = start_raylet(*given.args, **given.kwargs)
        session_folder = Path(given.arguments["session_dir"])
        start_template(session_folder, dict(environment()) | worker_variables(raylet.process.pid))
        return raylet

    services.start_raylet = start_with_template
    try:
        yield
    finally:
        services.start_raylet = start_raylet


def worker_variables(raylet_pid: int) -> dict[str, str]:
    """Return the variables that Ray sets for workers of a cluster's first job and reads at import."""
    from ray import JobID

    return {"RAY_JOB_ID": JobID.from_int(1).hex(), "RAY_RAYLET_PID": str(raylet_pid)}


def start_template(session_folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start and return the template of the cluster with this session folder; it ends with this process."""
    place = forked_worker.socket_place(session_folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        place.chmod(0o600)
        listener.listen(128)
        command = [sys.executable, "-m", "app.cli.worker_template", str(listener.fileno())]
        return subprocess.Popen(command, env=dict(environment), pass_fds=[listener.fileno()])
