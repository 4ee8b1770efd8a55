"""A process that imports what all workers of a server need and forks them, so that they share those modules' memory.

Ray starts every worker as a new interpreter, in which importing Ray, Serve and our modules takes one to two seconds of
CPU time and tens of megabytes. A fork has them at once, and shares the pages that it does not change.

Run as a program, by `app.cli.worker_forks`, for one cluster; it ends with that cluster. A fork takes the arguments,
environment, working directory and standard streams of the process that Ray started for it (`app.cli.forked_worker`).
If that process has another interpreter or environment than the imports here had, or if forks of this process would be
unsound, it becomes a plain worker. Neither torch nor transformers are imported here: they start threads and read the
environment, and only some workers need them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import NamedTuple

from app.cli.forked_worker import STANDARD_STREAMS, default_worker

NEEDED_FIRST = ("ray.serve._private.replica", "ray.serve._private.controller", "ray.serve._private.proxy")
NEEDED_LATER = ("app.builder", "deployments.accounts.actor", "deployments.batches.actor", "deployments.routing.router")
"""Imported while no worker is requested."""
SET_BY_RAY = frozenset({"RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV"})
"""Variables that Ray sets for its workers and that no module reads at import."""


class WorkerRequest(NamedTuple):
    """A worker requested by Ray."""

    executable: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


def draw_actor_class_ids_from_the_system() -> None:
    """Keep imports that define actors from seeding Ray's id generator: all forks would draw the same ids."""
    from ray import ActorClassID, actor

    actor.ActorClassID = SimpleNamespace(from_random=lambda: ActorClassID(os.urandom(ActorClassID.size())))


def has_sound_forks() -> bool:
    """Tell whether a fork equals a new process: this one has a single thread, and each fork draws different ids."""
    return len(os.listdir("/proc/self/task")) == 1 and _id_of_a_fork() != _id_of_a_fork()


def _id_of_a_fork() -> bytes:
    from ray import NodeID

    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, NodeID.from_random().binary())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def can_be_a_fork(asked: WorkerRequest, environment: dict[str, str]) -> bool:
    """Tell whether the modules imported here are as the worker itself would have imported them.

    Args:
        environment: the environment in which they were imported.
    """
    names = (environment.keys() | asked.environment.keys()) - SET_BY_RAY
    is_alike = all(environment.get(name) == asked.environment.get(name) for name in names)
    return is_alike and asked.executable == sys.executable


def serve(listener: socket.socket, environment: dict[str, str]) -> None:
    """Fork a worker for each request. Returns only in a fork, once its worker has ended.

    Args:
        environment: the environment in which modules were imported here.
    """
    later = list(NEEDED_LATER)
    is_sound = has_sound_forks()
    gc.freeze()
    while True:
        listener.settimeout(0 if later else None)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            _import(later.pop(0))
            is_sound = has_sound_forks()
            gc.collect()
            gc.freeze()
            continue
        with connection:
            if (asked := _read(connection)) is None:
                continue
            is_worker = is_sound and can_be_a_fork(asked, environment) and os.fork() == 0
            if is_worker:
                listener.close()
                connection.sendall(b"!")
        if is_worker:
            return _work(asked)
        for stream in asked.streams:
            os.close(stream)


def _import(module: str) -> None:
    # A worker that needs it will report why the import fails.
    with suppress(ImportError):
        importlib.import_module(module)


def _read(connection: socket.socket) -> WorkerRequest | None:
    connection.settimeout(None)
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STANDARD_STREAMS))
    try:
        with connection.makefile("rb") as file:
            executable, arguments, environment, folder = json.load(file)
        return WorkerRequest(executable, arguments, environment, folder, streams)
    except (OSError, ValueError, TypeError):
        # The requesting process ended in the middle of its request.
        for stream in streams:
            os.close(stream)
        return None


def _work(asked: WorkerRequest) -> None:
    # Ray kills what a worker leaves behind by its process group.
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, given in zip(STANDARD_STREAMS, asked.streams, strict=True):
        os.dup2(given, stream)
        os.close(given)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    sys.argv = [default_worker(), *asked.arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Run the program; its only argument is the file descriptor of a listening socket."""
    from ray._private.utils import set_kill_on_parent_death_linux

    set_kill_on_parent_death_linux()
    # A parent must wait for its children or ignore their end; otherwise they stay zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    environment = dict(os.environ)
    # numpy's own threads would not survive a fork.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    draw_actor_class_ids_from_the_system()
    for module in NEEDED_FIRST:
        _import(module)
    serve(socket.socket(fileno=int(sys.argv[1])), environment)


if __name__ == "__main__":
    main()
