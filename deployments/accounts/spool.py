"""Usage records on their way to the ledger, in a file of each gateway's own: they outlive the gateway.

A record is written before the answer's last byte leaves, one line each, and the file is emptied once the ledger has
them. What a gateway leaves behind when it dies is found by the next one that looks: the lock on its file is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from deployments.accounts.values import UsageRecord

_logger = logging.getLogger(__name__)

MAX_PENDING = 100_000
"""Records held in memory; beyond them the oldest are lost, and counted."""
MAX_STALE, MAX_MOVED = 10_000, 1_000
"""So many records that the ledger has may lie in the file; then those that it lacks move to another, if so few."""


class Spool:
    """The records of one gateway that the ledger may not have yet; one thread at a time.

    Attributes:
        num_unwritten: records that could not be written to the file (a full disk), and are in memory only.
        num_lost: records that neither the file nor memory had room for.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.num_unwritten = 0
        self.num_lost = 0
        self._pending: deque[UsageRecord] = deque()
        self._folder = Path(folder)
        self._name = name
        self._path = self._folder
        self._file: int | None = None
        self._num_files = 0
        self._num_stale = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._begin_file()
        except OSError as error:
            _logger.warning("usage records stay in memory until they are stored: %s", error)

    def add(self, record: UsageRecord) -> None:
        """Keep a record: in the file, and in memory until it is acknowledged."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self.num_lost += 1
        self._pending.append(record)
        line = _line(record)
        try:
            if self._file is None or os.write(self._file, line) != len(line):
                self.num_unwritten += 1
        except OSError:
            self.num_unwritten += 1

    def pending(self, limit: int) -> list[UsageRecord]:
        """Return the oldest records that have not been acknowledged."""
        return list(islice(self._pending, limit))

    @property
    def num_pending(self) -> int:
        """How many there are."""
        return len(self._pending)

    def acknowledge(self, count: int) -> None:
        """Forget the oldest `count` records: the ledger has them."""
        for _ in range(min(count, len(self._pending))):
            self._pending.popleft()
        self._num_stale += count
        if not self._pending:
            self.num_unwritten = 0
        if self._file is None:
            return
        try:
            if not self._pending:
                os.ftruncate(self._file, 0)
            elif self._num_stale >= MAX_STALE and len(self._pending) <= MAX_MOVED:
                # Where answers end all the time some are always on their way, and the file would grow for ever.
                self._begin_file()
            else:
                return
        except OSError as error:
            _logger.warning("the spool of usage records cannot be emptied: %s", error)
        else:
            self.num_unwritten = self._num_stale = 0

    def _begin_file(self) -> None:
        """Move to a new file with what is pending.

        Raises:
            OSError: there is none, and the one before stays.
        """
        path = self._folder / f"{self._name}.{self._num_files}.jsonl"
        # Named once it is locked: a gateway that looks in between would take it for an orphan, and remove it.
        nameless = path.with_suffix(".new")
        file = os.open(nameless, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = b"".join(map(_line, self._pending))
            if os.write(file, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(nameless, path)
        except OSError:
            os.close(file)
            raise
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
        self._file, self._path = file, path
        self._num_files += 1

    def orphans(self) -> Iterator[tuple[list[UsageRecord], Path]]:
        """Yield what dead gateways have left: their records, and the file to remove once the ledger has them."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path == self._path:
                continue
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield _read(file.read()), path
            except OSError:
                # Its gateway lives, or another one has just taken care of it.
                continue


def _line(record: UsageRecord) -> bytes:
    # A line that a full disk has cut must not spoil the next one.
    return f"\n{json.dumps(asdict(record))}\n".encode()


def _read(content: bytes) -> list[UsageRecord]:
    records = []
    for line in filter(None, content.splitlines()):
        try:
            records.append(UsageRecord(**json.loads(line)))
        except (ValueError, TypeError):
            # The last line of a process that was killed while it wrote; its answer had not ended yet.
            _logger.warning("a line of a spool of usage records is broken")
    return records
