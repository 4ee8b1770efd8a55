"""Files of adapters that lie on another node: fetched once and kept by digest, least recently used out first.

For any thread; processes of one node may share the folder. A content that came is checked against its digest, so that
nothing else is ever served under it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from adapters.errors import AdapterError
from adapters.file_store import INCOMING, FileStore
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.identity import AdapterRef, adapter_digest

ABANDONED_S = 3600.0
"""What has been on its way for so long has lost its process."""

ReadFile = Callable[[AdapterRef, str, int], bytes]
"""Returns some bytes of a file of an adapter from an offset on, none at its end; raises AdapterError."""


class FileCache:
    """A folder of at most `max_bytes`, or of the one adapter that was wanted last."""

    def __init__(self, folder: str, *, max_bytes: int, read: ReadFile) -> None:
        self._store = FileStore(folder)
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._read = read

    def locate(self, ref: AdapterRef) -> AdapterRef:
        """Return a reference to files of this node.

        Raises:
            AdapterError: they cannot be fetched, or are not what they should be.
        """
        if os.path.isdir(ref.path):
            return ref
        here = self._store.ref(ref.name, ref.digest)
        if not os.path.isdir(here.path):
            incoming = self._store.bring(ref.name, partial(self._fill, ref))
            try:
                if adapter_digest(incoming, ref.name) != ref.digest:
                    raise AdapterError(ref.name, "its files have changed since it was declared; declare it anew")
                self._store.move(incoming, here)
            finally:
                shutil.rmtree(incoming, ignore_errors=True)
        # Whoever is read now is the last to be evicted, by this process or another.
        os.utime(here.path)
        with suppress(FileNotFoundError):
            self._evict(keep=here)
        return here

    def _fill(self, ref: AdapterRef, target: str) -> None:
        for file in (CONFIG_FILE, TENSOR_FILE):
            with open(os.path.join(target, file), "xb") as copy:
                while content := self._read(ref, file, copy.tell()):
                    copy.write(content)

    def _evict(self, keep: AdapterRef) -> None:
        """Meet the bound; what another process deletes meanwhile raises FileNotFoundError."""
        folders = sorted((path.stat().st_mtime, path) for path in self._folder.iterdir())
        bytes_of = {path: sum(file.stat().st_size for file in path.iterdir()) for _, path in folders}
        left = sum(bytes_of.values())
        for used_s, path in folders:
            if path.name.startswith(INCOMING):
                may_go = time.time() - used_s > ABANDONED_S
            else:
                may_go = left > self._max_bytes and path.name != keep.digest
            if may_go:
                left -= bytes_of[path]
                shutil.rmtree(path, ignore_errors=True)
