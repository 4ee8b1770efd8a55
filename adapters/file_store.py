"""The files of adapters in a folder of our own, by digest: nobody else changes them. Blocks; no torch.

folder / DIGEST / adapter_config.json, adapter_model.safetensors       for as long as somebody wants it
folder / .incoming-*                                                   on its way in, not looked at yet
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from adapters.errors import AdapterError
from adapters.finite import find_not_finite
from adapters.folder import CONFIG_FILE, TENSOR_FILE, open_under, refuse_pickle
from adapters.identity import AdapterDigest, AdapterRef, content_digest, read_adapter
from adapters.validate import ModuleShapes, validate

INCOMING = ".incoming-"
_FULL = (errno.ENOSPC, errno.EDQUOT)

Fill = Callable[[str], None]
"""Puts the two files of an adapter into an empty folder."""


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
        except BaseException as error:
            shutil.rmtree(incoming, ignore_errors=True)
            if isinstance(error, OSError) and error.errno not in _FULL:
                raise AdapterError(name, f"its files cannot be copied ({error.strerror})") from error
            raise
        return incoming

    def keep(self, name: str, incoming: str, shapes: ModuleShapes, max_rank: int) -> AdapterRef:
        """Check what `bring` has brought, move it to where it stays, and say what it is.

        Raises:
            AdapterError: it is malformed, does not fit the base model, or holds numbers that are not finite.
        """
        config, tensors = read_adapter(name, incoming)
        validate(name, config, tensors.entry_by_name, shapes, max_rank)
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

    def ref(self, name: str, digest: AdapterDigest) -> AdapterRef:
        """Return the reference of a content that lies here, or will."""
        return AdapterRef(name=name, path=os.path.join(self._folder, digest), digest=digest)

    def has(self, ref: AdapterRef) -> bool:
        """Tell whether a reference is to files of this folder."""
        return os.path.dirname(ref.path) == self._folder

    def delete(self, ref: AdapterRef) -> None:
        """Delete a content of this folder; others are left alone."""
        if self.has(ref):
            shutil.rmtree(ref.path, ignore_errors=True)

    def clear(self) -> None:
        """Delete what processes that died have left on its way; nobody may be bringing anything."""
        for left in Path(self._folder).glob(f"{INCOMING}*"):
            shutil.rmtree(left, ignore_errors=True)


def copy_from(name: str, path: str) -> Fill:
    """Return what copies the adapter in a folder, and raises AdapterError where one of its files may not be read."""

    def fill(target: str) -> None:
        refuse_pickle(name, path)
        for file in (CONFIG_FILE, TENSOR_FILE):
            with open_under(name, path, file) as source, open(os.path.join(target, file), "xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)

    return fill
