"""Usage records on their way to the ledger, in one file per gateway so that they outlive it.

A record is written, as one line, before the answer's last byte is sent; the file is emptied once the ledger has all
records. The file of a dead gateway is no longer locked, so the next gateway that scans the folder finds it. While the
ledger is away, full files are set aside for that scan, too.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import logging
import os
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from adapters.private_file import make_private_folder
from deployments.accounts.values import UsageRecord

_logger = logging.getLogger(__name__)

MAX_PENDING = 100_000
"""Records held in memory; with so many, their file is set aside, and another one begun."""
MAX_SET_ASIDE = 10
"""Files set aside, of some 35 MB each; beyond these, or on a full disk, further records are lost, and counted."""
LOSSES_PER_LINE = 10_000
MAX_STALE, MAX_MOVED = 10_000, 1_000
"""With `MAX_STALE` acknowledged records in the file, the pending ones, if at most `MAX_MOVED`, move to a new file."""


class Spool:
    """The records of one gateway that the ledger may not have yet; for one thread at a time.

    Attributes:
        num_unwritten: records that could not be written to the file (a full disk) and are only in memory.
        num_set_aside: records in files that were set aside; reduced by whoever has sent what `orphans` returns.
        num_lost: records for which there was no room.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.num_unwritten = 0
        self.num_set_aside = 0
        self.num_lost = 0
        self._pending: deque[UsageRecord] = deque()
        self._folder = Path(folder)
        self._name = name
        self._path = self._folder
        self._file: int | None = None
        self._num_files = 0
        self._num_stale = 0
        try:
            self._begin_file()
        except OSError as error:
            _logger.warning("usage records stay in memory until they are stored: %s", error)

    def add(self, record: UsageRecord) -> None:
        """Store a record in the file, and in memory until it is acknowledged."""
        if len(self._pending) >= MAX_PENDING and not self._set_aside():
            if self.num_lost % LOSSES_PER_LINE == 0:
                _logger.error("usage records are lost: %d wait already", len(self._pending) + self.num_set_aside)
            self.num_lost += 1
            return
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
        """The number of records not acknowledged yet."""
        return len(self._pending)

    def acknowledge(self, records: Sequence[UsageRecord]) -> None:
        """Drop records that `pending` returned and the ledger has stored; `add` may have set them aside."""
        for record in records:
            if self._pending and self._pending[0] is record:
                self._pending.popleft()
        self._num_stale += len(records)
        if not self._pending:
            self.num_unwritten = 0
        try:
            if self._file is not None and not self._pending:
                os.ftruncate(self._file, 0)
            elif (self._file is None or self._num_stale >= MAX_STALE) and len(self._pending) <= MAX_MOVED:
                # A disk that was full at the start may have room. And under constant load some records are always
                # pending, and the file would grow forever.
                self._begin_file()
            else:
                return
        except OSError as error:
            if self._file is not None:
                _logger.warning("the spool of usage records cannot be emptied: %s", error)
        else:
            self.num_unwritten = self._num_stale = 0

    def _set_aside(self) -> bool:
        """Leave the pending records, with their file, to the next scan for orphans; return whether that is possible."""
        own = f"{glob.escape(self._name)}.*.jsonl"
        if self._file is None or self.num_unwritten or len(list(self._folder.glob(own))) > MAX_SET_ASIDE:
            return False
        full, self._file = self._file, None
        pending, self._pending = self._pending, deque()
        try:
            self._begin_file()
        except OSError:
            self._file, self._pending = full, pending
            return False
        os.close(full)
        self.num_set_aside += len(pending)
        self._num_stale = 0
        return True

    def _begin_file(self) -> None:
        """Switch to a new file that holds the pending records.

        Raises:
            OSError: the new file cannot be created; the old one stays in use.
        """
        make_private_folder(self._folder)
        path = self._folder / f"{self._name}.{self._num_files}.jsonl"
        # Gets its final name once locked: a gateway that scans in between would take it for an orphan and remove it.
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
            nameless.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
        self._file, self._path = file, path
        self._num_files += 1

    def orphans(self) -> Generator[tuple[list[UsageRecord], Path], None, None]:
        """Yield each dead gateway's records, and the path to remove once the ledger has them; any thread."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path == self._path:
                continue
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield _read(file.read()), path
            except OSError:
                # Its gateway is alive, or another gateway has just handled it.
                continue


def _line(record: UsageRecord) -> bytes:
    # The leading newline keeps a line truncated by a full disk from corrupting the next one.
    return f"\n{json.dumps(asdict(record))}\n".encode()


def _read(content: bytes) -> list[UsageRecord]:
    records = []
    for line in filter(None, content.splitlines()):
        try:
            records.append(UsageRecord(**json.loads(line)))
        except (ValueError, TypeError):
            # Truncated by a full disk, or by a process killed while writing, whose answer had not ended yet.
            _logger.warning("a line of a spool of usage records is broken")
    return records
