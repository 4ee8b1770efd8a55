"""A file of output lines that grows by whole lines or not at all: what it holds is what is done. Standard library only.

A process may be killed, and a disk may be full, at any byte. A line counts once it ends with its newline and is on the
disk; whatever stands behind the last such line is cut off before another one is written.
"""

from __future__ import annotations

import errno
import json
import os


class ResultFile:
    """The lines of one output file; for one thread at a time.

    Attributes:
        custom_ids: of the lines that are in it.

    Raises:
        OSError: it cannot be opened, read or cut now.
    """

    def __init__(self, path: str) -> None:
        self.custom_ids: set[str] = set()
        self._size = 0
        self._has_torn_tail = False
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, custom_id: str, line: bytes) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            OSError: it cannot be written now, and is not in the file; it may be tried again.
        """
        if self._has_torn_tail:
            os.ftruncate(self._file, self._size)
        self._has_torn_tail = True
        if os.pwrite(self._file, line, self._size) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file)
        self._has_torn_tail = False
        self._size += len(line)
        self.custom_ids.add(custom_id)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self) -> None:
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                try:
                    custom_id = json.loads(line)["custom_id"]
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self.custom_ids.add(custom_id)
                self._size += len(line)
        os.ftruncate(self._file, self._size)
