"""What earlier starts of a server found in its drop-in folders.

A thousand adapters of a large model are a hundred GB, which would be read at each start only to learn that they have
not changed. Whatever was read and fitted is known by the signature of its files. Should a content change and keep its
signature, no replica would serve it: they look at its digest when they load it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from adapters.identity import AdapterDigest, AdapterRef
from adapters.private_file import make_private_folder

_logger = logging.getLogger(__name__)


class KnownAdapters:
    """References to adapters that fitted, by everything that decides whether they do. Thread-safe.

    Args:
        path: file that remembers them; None: nothing is remembered.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._earlier = {} if path is None else _read(path)
        self._now: dict[str, AdapterRef] = {}

    def reference(self, read: Callable[[], AdapterRef], *decides: object) -> AdapterRef:
        """Return the reference that `read` returns, or has returned for equal values of `decides`."""
        key = hashlib.sha256(repr(decides).encode()).hexdigest()
        found = self._now[key] = self._earlier.get(key) or read()
        return found

    def save(self) -> None:
        """Remember what has been asked for, and nothing else; without room for it, the next start reads all."""
        if self._path is None or self._now == self._earlier:
            return
        text = json.dumps({key: astuple(ref) for key, ref in self._now.items()})
        try:
            make_private_folder(self._path.parent)
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                with open(descriptor, "w") as file:
                    file.write(text)
                os.replace(name, self._path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            _logger.warning("%s cannot be written, so the next start reads all adapters again: %s", self._path, error)


def _read(path: Path) -> dict[str, AdapterRef]:
    try:
        return {
            key: AdapterRef(
                name=name, path=folder, digest=AdapterDigest(digest), invocation_ids=tuple(ids), num_labels=sum(labels)
            )
            # Files of earlier releases tell no labels: those refused what has any.
            for key, (name, folder, digest, ids, *labels) in json.loads(path.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _logger.warning("%s cannot be read, so all adapters are read again: %s", path, error)
        return {}
