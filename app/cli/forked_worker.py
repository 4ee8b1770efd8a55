"""The program that Ray starts for each worker: requests a fork of `app.cli.worker_template`, or becomes a plain worker.

It imports little, and exits as soon as the fork exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

STANDARD_STREAMS = (0, 1, 2)


def template_place(arguments: Sequence[str]) -> Path:
    """Return the path of the template's socket, from the arguments that Ray gives a worker."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)
    return socket_place(Path(given["temp-dir"], given["session-name"]))


def socket_place(session_folder: Path) -> Path:
    """Return the path of the template's socket in Ray's session folder of a cluster."""
    # Not longer than the names of Ray's own sockets: the length of a socket path is limited.
    return session_folder / "sockets" / "template"


def default_worker() -> str:
    """Return the path of Ray's own program for workers, without importing Ray."""
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py")


def ask_for_a_fork(place: Path, arguments: Sequence[str]) -> bool:
    """Ask the template to fork a worker equal to this process except for its pid; return whether it did."""
    asked = [sys.executable, list(arguments), dict(os.environ), os.getcwd()]
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(str(place))
            socket.send_fds(template, [b"?"], STANDARD_STREAMS)
            template.sendall(json.dumps(asked).encode())
            template.shutdown(socket.SHUT_WR)
            return bool(template.recv(1))
    except OSError:
        # The template is gone: only its savings are lost.
        return False


def main() -> None:
    """Run the program."""
    arguments = sys.argv[1:]
    if not ask_for_a_fork(template_place(arguments), arguments):
        command = [default_worker() if word == sys.argv[0] else word for word in sys.orig_argv]
        os.execv(sys.executable, [sys.executable, *command[1:]])


if __name__ == "__main__":
    main()
