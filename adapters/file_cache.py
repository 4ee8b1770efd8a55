"""Cache of adapter files from other nodes: fetched once, kept by digest, evicted in LRU order.

Thread-safe; processes of one node may share the folder. Fetched content is verified against its digest, and content
left by another process is verified once, so a digest never serves anything else.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_store import INCOMING, FileStore, is_digest
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest

ABANDONED_S = 3600.0
"""An incoming folder this old was abandoned by a process that died."""
RECENT_S = 60.0
"""Content located this recently is not evicted, even over the bound: this or another process may not have read it."""

ReadFile = Callable[[AdapterRef, str, int], bytes]
"""Returns some bytes of an adapter's file from an offset on, empty at its end; raises AdapterError."""


class FileCache:
    """A folder of at most `max_bytes`, exceeded only by content located within the last `RECENT_S`."""

    def __init__(self, folder: str, *, max_bytes: int, read: ReadFile) -> None:
        self._store = FileStore(folder)
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._read = read
        self._checked: set[AdapterDigest] = set()

    def locate(self, ref: AdapterRef) -> AdapterRef:
        """Return a reference to the adapter's files on this node, fetching them if necessary.

        Raises:
            AdapterUnavailableError: they cannot be fetched now, or this node's disk is full.
            AdapterError: they do not exist, or do not match the digest.
        """
        if os.path.isdir(ref.path):
            return ref
        here = self._store.moved(ref)
        while not self._is_here(here):
            self._fetch(ref, here)
        self._evict()
        return here

    def _is_here(self, here: AdapterRef) -> bool:
        """Tell whether the content is cached, and mark it most recently used for all processes."""
        try:
            os.utime(here.path)
        except FileNotFoundError:
            return False
        if here.digest not in self._checked and not self._store.is_whole(here):
            return False
        self._checked.add(here.digest)
        return True

    def _fetch(self, ref: AdapterRef, here: AdapterRef) -> None:
        try:
            incoming = self._store.bring(partial(self._fill, ref))
        except OSError as error:
            # Transient: content over the bound is kept only while it is recent.
            raise AdapterUnavailableError(ref.name, f"its files cannot be kept here ({error.strerror})") from error
        try:
            if adapter_digest(incoming, ref.name) != ref.digest:
                raise AdapterError(ref.name, "the files of this version have been overwritten; load it again")
            # It is as old as its first byte, which may have come long ago.
            os.utime(incoming)
            self._store.move(incoming, here)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        self._checked.add(ref.digest)

    def _fill(self, ref: AdapterRef, target: str) -> None:
        for file in (CONFIG_FILE, TENSOR_FILE):
            with open(os.path.join(target, file), "xb") as copy:
                while content := self._read(ref, file, copy.tell()):
                    copy.write(content)

    def _evict(self) -> None:
        """Evict until the bound holds; delete abandoned incoming folders."""
        folders = self._folders()
        left = sum(num_bytes for _, num_bytes, _ in folders)
        for age_s, num_bytes, path in folders:
            if path.name.startswith(INCOMING):
                if age_s > ABANDONED_S:
                    left -= num_bytes
                    shutil.rmtree(path, ignore_errors=True)
            elif left > self._max_bytes and age_s >= RECENT_S:
                left -= num_bytes
                self._store.delete(AdapterDigest(path.name))

    def _folders(self) -> list[tuple[float, int, Path]]:
        """Return (seconds since the last use, bytes, folder) of each content, the least recently used first."""
        found, now_s = [], time.time()
        for path in self._folder.iterdir():
            # Another process may delete it meanwhile.
            with suppress(OSError):
                if is_digest(path.name) or path.name.startswith(INCOMING):
                    num_bytes = sum(file.stat().st_size for file in path.iterdir())
                    # A time far ahead is from before the clock was set back, and so long past.
                    found.append((abs(now_s - path.stat().st_mtime), num_bytes, path))
        return sorted(found, reverse=True)
