"""A tier in a file, which outlives the process: cached prefixes survive a restart.

    header | record of each slot: name, depth, sequence number, CRC-32 | slots

A record is written after its slot's content, and its checksum also covers the name, so that a write torn by a crash or
a full disk is detected when read. Names are cryptographic hashes of tokens, adapter and salt. Weights and layout are
checked per file, in the header: a file written for others is reset.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from adapters.errors import FULL_DISK
from adapters.private_file import make_private_folder
from engine.cache.prefix_index import BlockName
from engine.errors import ConfigError
from engine.ports import KeptBlock

HEADER = struct.Struct("<16s32sQQ")
"""Magic, digest of the fingerprint, bytes of a block, number of slots."""
MAGIC = b"antiphon blocks1"
RECORD = struct.Struct("<32sQQI12x")
"""Name, depth, sequence number (0 for an empty slot), checksum."""
MAX_SEQUENCE = 1 << 63
"""A record with a higher number was damaged: few others could follow it."""
PAGE_BYTES = 4096
MAX_FILES = 64
"""The most engines that may share a folder: each has its own file."""


class DiskFullError(ConfigError):
    """There is no room for a new file."""


class DiskSlots:
    """Slots of one block each in one file of a folder, locked against other processes.

    Args:
        folder: created if missing.
        title: prefix of the file's name; files with another title are not touched.
        fingerprint: of everything that a block's content depends on besides its name.

    Raises:
        ConfigError: the folder cannot be written, or other engines use all `MAX_FILES` files.
        DiskFullError: the disk is full.
    """

    def __init__(self, folder: Path, title: str, fingerprint: str, *, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        header = HEADER.pack(MAGIC, hashlib.sha256(fingerprint.encode()).digest(), block_bytes, num_slots)
        self._records_at = PAGE_BYTES
        self._slots_at = self._records_at + -(-num_slots * RECORD.size // PAGE_BYTES) * PAGE_BYTES
        try:
            self._file = _open_free(folder, title, header)
            try:
                records = self._begin(header, num_slots)
            except BaseException:
                os.close(self._file)
                raise
        except (OSError, OverflowError, MemoryError) as error:
            why = error.strerror if isinstance(error, OSError) else f"{num_slots} blocks are too many"
            is_full = isinstance(error, OSError) and error.errno in FULL_DISK
            kind = DiskFullError if is_full else ConfigError
            raise kind(f"kv_disk_folder: {folder} cannot be used: {why}.") from error
        self._sums: dict[int, int] = {}
        self._kept = sorted(self._parse(records), key=lambda kept: kept[0])
        self._sequence = self._kept[-1][0] if self._kept else 0

    def _begin(self, header: bytes, num_slots: int) -> bytes:
        """Make the file ready, emptied unless its header is `header`; return its records."""
        if os.pread(self._file, HEADER.size, 0) != header:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        # Sparse: it takes disk space only for what has been written.
        os.ftruncate(self._file, self._slots_at + num_slots * self._block_bytes)
        return os.pread(self._file, num_slots * RECORD.size, self._records_at)

    def contents(self) -> list[KeptBlock]:
        """Return what the file held when it was opened, the least recently written first; only the first call does."""
        # Not kept: the list may be large.
        kept, self._kept = self._kept, []
        return [block for _, block in kept]

    def write(self, slot: int, name: BlockName, depth: int, content: torch.Tensor) -> None:
        """Write a block's content, bytes [block_bytes], then its record.

        Raises:
            OSError: they could not be written; the slot holds nothing.
        """
        numbers = content.numpy().data
        checksum = zlib.crc32(numbers, zlib.crc32(name))
        self._put(numbers, self._slots_at + slot * self._block_bytes)
        self._sequence += 1
        self._put(memoryview(RECORD.pack(name, depth, self._sequence, checksum)), self._record_at(slot))
        self._sums[slot] = checksum

    def read(self, slot: int, name: BlockName) -> torch.Tensor | None:
        """Read the content, bytes [block_bytes], and verify its checksum; None if it is not intact."""
        content = torch.empty(self._block_bytes, dtype=torch.uint8)
        numbers = content.numpy().data
        try:
            count = os.preadv(self._file, [numbers], self._slots_at + slot * self._block_bytes)
        except OSError:
            return None
        is_whole = count == self._block_bytes and zlib.crc32(numbers, zlib.crc32(name)) == self._sums.get(slot)
        return content if is_whole else None

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self._file)

    def _put(self, numbers: memoryview, at: int) -> None:
        while numbers:
            count = os.pwrite(self._file, numbers, at)
            numbers, at = numbers[count:], at + count

    def _record_at(self, slot: int) -> int:
        return self._records_at + slot * RECORD.size

    def _parse(self, records: bytes) -> Iterator[tuple[int, KeptBlock]]:
        names = set()
        for slot, (name, depth, sequence, checksum) in enumerate(RECORD.iter_unpack(records)):
            if 0 < sequence <= MAX_SEQUENCE and name not in names:
                names.add(name)
                self._sums[slot] = checksum
                yield sequence, KeptBlock(BlockName(name), depth, slot)


def _open_free(folder: Path, title: str, header: bytes) -> int:
    """Open, lock and return a file of a title that no other process has locked.

    It is the one written last among those with this header, which keep their content, else the first one.
    """
    make_private_folder(folder)
    paths = [folder / f"{title}-{number}.blocks" for number in range(MAX_FILES)]
    fitting = sorted((path for path in paths if _begins_with(path, header)), key=os.path.getmtime, reverse=True)
    for path in (*fitting, *paths):
        # Readable by the owner only: the content reveals the prompts.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(file, 0o600)
            return file
        os.close(file)
    raise ConfigError(f"kv_disk_folder: {folder} has {MAX_FILES} files in use by other engines.")


def _begins_with(path: Path, header: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header
    except OSError:
        return False
