"""Usage records on their way to the ledger, in a file of each gateway's own: they outlive the gateway.

A record is written before the answer's last byte leaves, one line each, and the file is emptied once the ledger has
them. What a gateway leaves behind when it dies is found by the next one that looks: the lock on its file is gone.
"""

from __future__ import annotations

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
        self._path = self._folder / f"{name}.jsonl"
        self._file: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Named once it is locked: a gateway that looks in between would take it for an orphan, and remove it.
            nameless = self._path.with_suffix(".new")
            self._file = os.open(nameless, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(nameless, self._path)
        except OSError as error:
            _logger.warning("usage records stay in memory until they are stored: %s", error)

    def add(self, record: UsageRecord) -> None:
        """Keep a record: in the file, and in memory until it is acknowledged."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self.num_lost += 1
        self._pending.append(record)
        # A line that a full disk has cut must not spoil the next one.
        line = f"\n{json.dumps(asdict(record))}\n".encode()
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
        if not self._pending and self._file is not None:
            self.num_unwritten = 0
            try:
                os.ftruncate(self._file, 0)
            except OSError as error:
                _logger.warning("the spool of usage records cannot be emptied: %s", error)

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


def _read(content: bytes) -> list[UsageRecord]:
    records = []
    for line in filter(None, content.splitlines()):
        try:
            records.append(UsageRecord(**json.loads(line)))
        except (ValueError, TypeError):
            # The last line of a process that was killed while it wrote; its answer had not ended yet.
            _logger.warning("a line of a spool of usage records is broken")
    return records
