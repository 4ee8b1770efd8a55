"""SQLite files and folders for the server's user only: whatever the umask, as they may hold what clients have sent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it, if they are missing; one that exists keeps its rights.

    Raises:
        OSError: it cannot be made, or is something else.
    """
    # `mkdir` with `parents` would let others into those above it.
    for path in reversed((folder, *folder.parents)):
        path.mkdir(mode=0o700, exist_ok=True)


def make_private(path: Path) -> None:
    """Make a SQLite file if it is missing; an older one loses the rights of others.

    SQLite gives the files beside it, which are made later, the same mode. A file of another user stays as it is.

    Raises:
        OSError: the file cannot be made or opened.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    for name in (path, f"{path}-wal", f"{path}-shm"):
        with suppress(FileNotFoundError, PermissionError):
            os.chmod(name, 0o600)
