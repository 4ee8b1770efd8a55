"""The files of adapters in a folder of our own, by digest: nobody else changes them. Blocks; no torch.

folder / DIGEST / adapter_config.json, adapter_model.safetensors       for as long as somebody wants it
folder / .incoming-*                                                   on its way in, not looked at yet, or out
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from adapters.errors import FULL_DISK, AdapterError
from adapters.finite import find_not_finite
from adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, TENSOR_FILE, open_under, refuse_pickle
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest, content_digest, read_adapter
from adapters.tensor_file import MAX_FILE_BYTES
from adapters.validate import ModuleShapes, validate

INCOMING = ".incoming-"

_DIGEST = re.compile(r"[0-9a-f]{64}")

Fill = Callable[[str], None]
"""Puts the two files of an adapter into an empty folder."""


def is_digest(name: str) -> bool:
    """Tell whether a file's name is that of a content."""
    return _DIGEST.fullmatch(name) is not None


class FileStore:
    """A folder of adapters. `bring` and `move` are for any thread, the rest for one at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)

    def bring(self, name: str, fill: Fill) -> str:
        """Return a new folder with an adapter's files, which is the caller's to keep or to delete.

        Raises:
            AdapterError: its files cannot be copied; or whatever `fill` raises.
            OSError: the folder's disk is full.
        """
        os.makedirs(self._folder, exist_ok=True)
        incoming = tempfile.mkdtemp(prefix=INCOMING, dir=self._folder)
        try:
            fill(incoming)
            # Names of contents outlive a failure of power, and so must what they stand for.
            _sync(incoming)
        except BaseException as error:
            shutil.rmtree(incoming, ignore_errors=True)
            if isinstance(error, OSError) and error.errno not in FULL_DISK:
                raise AdapterError(name, f"its files cannot be copied ({error.strerror})") from error
            raise
        return incoming

    def keep(self, name: str, incoming: str, shapes: ModuleShapes, max_rank: int) -> AdapterRef:
        """Check what `bring` has brought, move it to where it stays, and say what it is.

        Raises:
            AdapterError: it is malformed, does not fit the base model, or holds numbers that are not finite.
        """
        config, tensors = read_adapter(name, incoming, partial(validate, shapes=shapes, max_rank=max_rank))
        bad = find_not_finite(tensors)
        if bad is not None:
            raise AdapterError(name, f"tensor {bad!r} holds NaN or infinity")
        ref = self.ref(name, content_digest(config, tensors))
        self.move(incoming, ref)
        return ref

    def move(self, incoming: str, ref: AdapterRef) -> None:
        """Move what has been checked to where it stays, unless the same content lies there already."""
        try:
            os.replace(incoming, ref.path)
        except OSError:
            # Another process may have been first.
            if not os.path.isdir(ref.path):
                raise
            if not self.is_whole(ref):
                self.delete(ref)
                os.replace(incoming, ref.path)

    def is_whole(self, ref: AdapterRef) -> bool:
        """Tell whether the files of a reference are there and are what it says."""
        try:
            return adapter_digest(ref.path, ref.name) == ref.digest
        except AdapterError:
            return False

    def ref(self, name: str, digest: AdapterDigest) -> AdapterRef:
        """Return the reference of a content that lies here, or will."""
        return AdapterRef(name=name, path=os.path.join(self._folder, digest), digest=digest)

    def has(self, ref: AdapterRef) -> bool:
        """Tell whether a reference is to files of this folder."""
        return os.path.dirname(ref.path) == self._folder

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        """Return the reference of a content that lies here, None where it does not."""
        found = self.ref(ref.name, ref.digest)
        return found if is_digest(ref.digest) and os.path.isdir(found.path) else None

    def unused(self, used: Collection[str]) -> list[AdapterRef]:
        """Return the contents that lie here and whose digests are none of those that are used."""
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return [self.ref(name[:12], AdapterDigest(name)) for name in names if is_digest(name) and name not in used]

    def delete(self, ref: AdapterRef) -> None:
        """Delete a content of this folder; others are left alone."""
        if not self.has(ref):
            return
        # It goes at once and as a whole: a process that dies on the way leaves no part that would pass for it.
        going = os.path.join(self._folder, f"{INCOMING}{ref.digest}")
        shutil.rmtree(going, ignore_errors=True)
        with suppress(OSError):
            os.rename(ref.path, going)
        shutil.rmtree(going, ignore_errors=True)

    def clear(self) -> None:
        """Delete what processes that died have left on its way; nobody may be bringing anything."""
        for left in Path(self._folder).glob(f"{INCOMING}*"):
            shutil.rmtree(left, ignore_errors=True)


def copy_from(name: str, path: str) -> Fill:
    """Return what copies the adapter in a folder, and raises AdapterError where one of its files may not be read."""

    def fill(target: str) -> None:
        refuse_pickle(name, path)
        for file, max_bytes in ((CONFIG_FILE, MAX_CONFIG_BYTES), (TENSOR_FILE, MAX_FILE_BYTES)):
            with open_under(name, path, file) as source, open(os.path.join(target, file), "xb") as copy:
                if os.fstat(source.fileno()).st_size > max_bytes:
                    raise AdapterError(name, f"{file} has more than {max_bytes} bytes")
                shutil.copyfileobj(source, copy, 1 << 20)

    return fill


def _sync(folder: str) -> None:
    """Wait until the content of a folder's files is on the disk; their names follow with a store's next change."""
    for entry in os.scandir(folder):
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
