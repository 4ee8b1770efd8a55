"""A crash-safe file of output lines: its complete lines are the record of finished work. Standard library only.

A process may be killed, or a disk fill up, at any byte. A line counts once it is on disk with its newline; anything
after the last such line is truncated before the next one is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping


class ResultFile:
    """The lines of one output file; for one thread at a time.

    Attributes:
        custom_ids: those of the lines in the file.

    Raises:
        OSError: the file cannot be opened, read or truncated now.
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

    def append(self, lines: Mapping[str, bytes]) -> None:
        """Append lines, by their custom ids; they are on disk when this returns.

        Raises:
            OSError: they could not be written and do not count; the call may be retried.
        """
        text = b"".join(lines.values())
        if self._has_torn_tail:
            os.ftruncate(self._file, self._size)
        self._has_torn_tail = True
        if os.pwrite(self._file, text, self._size) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file)
        self._has_torn_tail = False
        self._size += len(text)
        self.custom_ids.update(lines)

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


def output_ids(batch_id: str) -> tuple[str, str]:
    """Return the ids of a batch's output and error file, fixed in advance so that a resumed batch reuses them."""
    name = batch_id.removeprefix("batch_")
    return f"file-out{name}", f"file-err{name}"
