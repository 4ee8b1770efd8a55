"""Open the files of an adapter's folder: only regular files under that folder. Standard library only.

A snapshot in the hub's cache is a folder of links to files outside it:

    models--ORG--NAME / snapshots / COMMIT / adapter_config.json -> ../../blobs/HASH
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from adapters.errors import SERVER_TROUBLES, AdapterError, AdapterUnavailableError

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_CONFIG_BYTES = 1 << 20
PART_BYTES = 4 << 20


@contextmanager
def open_under(name: str, folder: str, file: str) -> Iterator[BinaryIO]:
    """Open a file of adapter `name` for reading.

    Raises:
        AdapterError: it is missing, not a regular file, or a link that leads out of the folder, other than into
            the blobs of a snapshot of the hub.
        AdapterUnavailableError: this machine cannot open files now.
    """
    try:
        root = os.path.realpath(folder, strict=True)
    except (OSError, ValueError):
        raise AdapterError(name, "its folder does not exist or cannot be entered") from None
    try:
        path = os.path.realpath(os.path.join(root, file), strict=True)
        if not any(os.path.commonpath((allowed, path)) == allowed for allowed in (root, *_blobs_of(root))):
            raise AdapterError(name, f"{file} is a link that leads out of its folder")
        # The resolved path holds no link, and opening a pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterError(name, f"{file} is missing") from None
    except OSError as error:
        kind = AdapterUnavailableError if error.errno in SERVER_TROUBLES else AdapterError
        raise kind(name, f"{file} cannot be opened ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(name, f"{file} is not a regular file")
    with os.fdopen(descriptor, "rb") as opened:
        yield opened


def _blobs_of(root: str) -> tuple[str, ...]:
    """Return where links of a resolved folder may lead outside it: nowhere unless it is a snapshot of the hub."""
    repository, snapshots = os.path.split(os.path.dirname(root))
    is_snapshot = snapshots == "snapshots" and os.path.basename(repository).startswith("models--")
    return (os.path.join(repository, "blobs"),) if is_snapshot else ()


def read_config_bytes(name: str, folder: str) -> bytes:
    """Return the bytes of adapter_config.json.

    Raises:
        AdapterError: as `open_under`, or it is longer than `MAX_CONFIG_BYTES`.
    """
    with open_under(name, folder, CONFIG_FILE) as opened:
        content = opened.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError(name, f"{CONFIG_FILE} is longer than {MAX_CONFIG_BYTES} bytes")
    return content


def read_part(name: str, folder: str, file: str, offset: int) -> bytes:
    """Return up to `PART_BYTES` of one of an adapter's files from an offset on, empty at its end.

    Raises:
        AdapterError: as `open_under`.
    """
    with open_under(name, folder, file) as opened:
        opened.seek(offset)
        return opened.read(PART_BYTES)


def refuse_pickle(name: str, folder: str) -> None:
    """Refuse a folder whose tensors are pickled, before they are opened.

    Raises:
        AdapterError: there is no safetensors file, but a pickle.
    """
    if os.path.lexists(os.path.join(folder, TENSOR_FILE)):
        return
    for file in PICKLE_FILES:
        if os.path.lexists(os.path.join(folder, file)):
            raise AdapterError(name, f"{file} is a pickle, which can run code; save the adapter as {TENSOR_FILE}")
