"""As much of Ray as its workers are started with, in a folder for the import path; its worker tells what it is."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "__init__.py": """
import os
from types import SimpleNamespace
class NodeID:
    def from_random():
        return SimpleNamespace(binary=lambda: os.urandom(8))
class ActorClassID:
    def __init__(self, binary):
        self.binary = binary
    def size():
        return 28
class JobID:
    def from_int(number):
        return SimpleNamespace(hex=lambda: f"{number:08}")
""",
    "actor.py": "",
    "_private/utils.py": "def set_kill_on_parent_death_linux(): pass",
    "_private/workers/default_worker.py": """
import json, os, signal, sys
told = {
    "argv": sys.argv,
    "name": __name__,
    "parent": os.getppid(),
    "folder": os.getcwd(),
    "variables": dict(os.environ),
    "num_streams": len(os.listdir("/proc/self/fd")) - 1,
    "leads_its_group": os.getpgrp() == os.getpid(),
    "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
}
print(json.dumps(told), flush=True)
""",
}


def write_stand_in_ray(folder: Path) -> None:
    """Write the package into `folder`."""
    for name, text in _FILES.items():
        file = folder / "ray" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
