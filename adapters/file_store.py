"""Adapter files by digest in a folder that only this application changes. Blocks; no torch.

folder / DIGEST / adapter_config.json, adapter_model.safetensors       kept as long as it is used
folder / .incoming-*                                                   being copied, not yet checked, or being deleted
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, TENSOR_FILE, open_under, refuse_pickle
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest, content_digest, labels_in, read_adapter
from adapters.private_file import make_private_folder
from adapters.tensor_file import MAX_FILE_BYTES, TensorFile
from adapters.validate import ModuleShapes, validate

INCOMING = ".incoming-"

MARGIN_BYTES, MARGIN_PART = 16 << 20, 20
"""What stays free of the disk that adapters are copied to: the smaller of so many bytes and such a part of the disk."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_EXPONENT_BF16 = 0x7F80

Fill = Callable[[str], None]
"""Writes the two files of an adapter into an empty folder."""


def is_digest(name: str) -> bool:
    """Tell whether a file name is a content digest."""
    return _DIGEST.fullmatch(name) is not None


class FileStore:
    """A folder of adapters. `bring` and `move` are thread-safe; the rest is for one thread at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)

    def bring(self, fill: Fill) -> str:
        """Return a new folder filled with an adapter's files; the caller owns it and must keep or delete it.

        Raises:
            OSError: the files cannot be written, which is no fault of the adapter; or whatever `fill` raises.
        """
        make_private_folder(Path(self._folder))
        incoming = tempfile.mkdtemp(prefix=INCOMING, dir=self._folder)
        try:
            fill(incoming)
            # Recorded digests survive a power failure, so their files must as well.
            _sync(incoming)
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        return incoming

    def keep(self, name: str, incoming: str, shapes: ModuleShapes, max_rank: int) -> AdapterRef:
        """Check a folder from `bring`, move it to its final place and return its reference.

        It stays where it is only if the same content is already there, whole.

        Raises:
            AdapterError: it is malformed, does not fit the base model, or holds numbers that are not finite.
        """
        config, tensors = read_adapter(name, incoming, partial(validate, shapes=shapes, max_rank=max_rank))
        check_finite(name, tensors)
        ref = self.ref(name, content_digest(config, tensors))
        ref = replace(ref, invocation_ids=config.invocation_ids, num_labels=labels_in(tensors))
        self.move(incoming, ref)
        return ref

    def move(self, incoming: str, ref: AdapterRef) -> None:
        """Move a checked folder to its final place, unless the same content is already there."""
        try:
            os.replace(incoming, ref.path)
        except OSError:
            # Another process may have been first.
            if not os.path.isdir(ref.path):
                raise
            if not self.is_whole(ref):
                self.delete(ref.digest)
                os.replace(incoming, ref.path)

    def is_whole(self, ref: AdapterRef) -> bool:
        """Tell whether the files of a reference exist and match its digest."""
        try:
            return adapter_digest(ref.path, ref.name) == ref.digest
        except AdapterError:
            return False

    def ref(self, name: str, digest: AdapterDigest) -> AdapterRef:
        """Return the reference for a content that is, or will be, in this folder."""
        return AdapterRef(name=name, path=os.path.join(self._folder, digest), digest=digest)

    def moved(self, ref: AdapterRef) -> AdapterRef:
        """Return the reference to the same content in this folder."""
        return replace(ref, path=os.path.join(self._folder, ref.digest))

    def has(self, ref: AdapterRef) -> bool:
        """Tell whether a reference points into this folder."""
        return os.path.dirname(ref.path) == self._folder

    def find(self, ref: AdapterRef) -> AdapterRef | None:
        """Return the reference to a content in this folder, or None if it is not here."""
        found = self.moved(ref)
        return found if is_digest(ref.digest) and os.path.isdir(found.path) else None

    def unused(self, used: Collection[str]) -> list[AdapterRef]:
        """Return the contents in this folder whose digests are not in `used`."""
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return [self.ref(name[:12], AdapterDigest(name)) for name in names if is_digest(name) and name not in used]

    def delete(self, digest: AdapterDigest) -> None:
        """Delete a content of this folder, if it is there."""
        # Rename first, so that a process that dies meanwhile leaves no partial content under the digest.
        going = os.path.join(self._folder, f"{INCOMING}{digest}")
        shutil.rmtree(going, ignore_errors=True)
        with suppress(OSError):
            os.rename(os.path.join(self._folder, digest), going)
        shutil.rmtree(going, ignore_errors=True)

    def clear(self) -> None:
        """Delete incoming folders left by processes that died; nobody may be in `bring` meanwhile."""
        for left in Path(self._folder).glob(f"{INCOMING}*"):
            shutil.rmtree(left, ignore_errors=True)


def copy_files(name: str, path: str, target: str) -> None:
    """Copy the files of the adapter in a folder into an empty one.

    Raises:
        AdapterUnavailableError: the disk has no room for them now; nothing is written.
        AdapterError: a file may not be read.
    """
    refuse_pickle(name, path)
    with ExitStack() as opened:
        sources, num_bytes = {}, 0
        for file, max_bytes in ((CONFIG_FILE, MAX_CONFIG_BYTES), (TENSOR_FILE, MAX_FILE_BYTES)):
            source = sources[file] = opened.enter_context(open_under(name, path, file))
            file_bytes = os.fstat(source.fileno()).st_size
            if file_bytes > max_bytes:
                raise AdapterError(name, f"{file} has more than {max_bytes} bytes")
            num_bytes += file_bytes
        _check_room(name, target, num_bytes)
        for file, source in sources.items():
            with open(os.path.join(target, file), "xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)


def _check_room(name: str, folder: str, num_bytes: int) -> None:
    """Refuse what would take the last bytes of a disk, which others write to as well."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize - min(MARGIN_BYTES, disk.f_blocks * disk.f_frsize // MARGIN_PART)
    if num_bytes > free_bytes:
        reason = f"it has {num_bytes} bytes, and the server's disk has room for {max(0, free_bytes)} now"
        raise AdapterUnavailableError(name, reason)


def check_finite(name: str, tensors: TensorFile) -> None:
    """Refuse tensors that hold NaN or infinity; without torch, which the registry lacks.

    Raises:
        AdapterError: one does.
    """
    for tensor, entry in tensors.entry_by_name.items():
        content = tensors.bytes_of(entry)
        if entry.dtype == "BF16":
            bits = np.frombuffer(content, dtype="<u2")
            is_bad = bool(((bits & _EXPONENT_BF16) == _EXPONENT_BF16).any())
        else:
            is_bad = not np.isfinite(np.frombuffer(content, dtype="<f4" if entry.dtype == "F32" else "<f2")).all()
        if is_bad:
            raise AdapterError(name, f"tensor {tensor!r} holds NaN or infinity")


def _sync(folder: str) -> None:
    """Flush the content of a folder's files to disk; their names follow with a store's next change."""
    for entry in os.scandir(folder):
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
